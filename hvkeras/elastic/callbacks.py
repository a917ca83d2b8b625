"""Keras callbacks for elastic jobs: `ElasticCallback`, and callbacks that update a state during `fit`.

They derive from the callbacks of the Keras version that `tf.keras` refers to when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hvkeras import compat
from hvkeras.callbacks import backup_and_restore
from hvkeras.callbacks.base import KerasCallback
from hvkeras.data.accounts import keeps_accounts
from hvkeras.elastic.running import run
from hvkeras.elastic.state import State
from hvkeras.elastic.tensorflow_state import TensorFlowKerasState
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.optimizer import gather_optimizer
from hvkeras.job.queries import size
from hvkeras.typing import Logs, ModelLike


class CommitStateCallback(KerasCallback):
    """Callback to commit a state every few batches, at the end of each epoch, and on preemption (SIGTERM).

    Put it after the callbacks that update the state. A commit copies the full model. To resume in the middle of an
    epoch, the state must contain the batch index: see `UpdateBatchStateCallback`. Without it, `fit` restarts the epoch,
    and repeats the batches before the commit.

    Example:
        model.fit(dataset, callbacks=[hvd.elastic.CommitStateCallback(state, batches_per_commit=100)])

    Args:
        state: State to commit.
        batches_per_commit: Batches between commits; None to commit only at the end of each epoch.
    """

    def __init__(self, state: State, batches_per_commit: int | None = 1) -> None:
        super().__init__()
        self.state: State = state
        self.batches_per_commit: int | None = batches_per_commit
        self.batches_remaining: int | None = batches_per_commit  # until the next commit
        self._may_commit_early = False

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Reset the count of batches."""
        self.batches_remaining = self.batches_per_commit
        # Otherwise `fit` would repeat the batches before the commit.
        self._may_commit_early = bool(self.batches_per_commit) or keeps_accounts() or hasattr(self.state, "batch")

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commit the state every `batches_per_commit` batches."""
        is_due = False
        if self.batches_remaining:
            self.batches_remaining -= 1
            is_due = not self.batches_remaining
            self.batches_remaining = self.batches_remaining or self.batches_per_commit
        is_last = batch + 1 == _steps(self)  # on_epoch_end commits, after the updates at the epoch's end
        is_preempted = self._may_commit_early and self.state.must_commit()
        if (is_preempted or is_due) and not is_last:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commit the state at the end of an epoch."""
        self.commit()

    def commit(self) -> None:
        """Commit the state."""
        self.state.commit()


class UpdateBatchStateCallback(KerasCallback):
    """Callback to update `state.batch`, the number of completed batches of the epoch (0 between epochs).

    If `state.batch` is not 0 when `fit` begins, the first epoch skips that many batches, which were completed before
    the commit. The order of the data must therefore be reproducible: pass `shuffle=False`, or a seed.

    Example:
        model.fit(dataset, callbacks=[hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(
            state, batches_per_commit=100)])

    Args:
        state: State with an attribute `batch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self._begun = self._before = 0

    def set_model(self, model: ModelLike) -> None:
        """Set the model, and install the hooks for skipping batches before training begins."""
        super().set_model(model)
        compat.passes()

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Read the batch index from the state."""
        self._before = int(self.state.batch)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Skip the completed batches in the first epoch."""
        done, self._before = self._before, 0
        if done and not keeps_accounts():  # otherwise the sharded data resume at the commit by themselves
            compat.passes().at_next(lambda _: compat.Done(0, done, _nothing, _nothing))

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the batch number; the number that Keras passes at a batch's end differs between versions."""
        self._begun = batch

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Store the number of completed batches in the state."""
        done, steps = self._begun + compat.steps_per_execution(self.model), _steps(self)
        self.state.batch = done if steps is None else min(done, steps)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Reset `state.batch` to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(KerasCallback):
    """Callback to update `state.epoch`, the number of completed epochs over all calls of `fit`.

    Example:
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

    Args:
        state: State with an attribute `epoch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self.initial_epoch: int = cast(Any, state).epoch
        self._first = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the number of epochs completed before."""
        self.initial_epoch, self._first = self.state.epoch, -1

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the first epoch number of `fit`, which is its `initial_epoch`."""
        if self._first < 0:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Store the number of completed epochs in the state."""
        self.state.epoch = self.initial_epoch + epoch - self._first + 1


def _steps(callback: Any) -> int | None:
    steps: int | None = (callback.params or {}).get("steps")
    return steps


def _nothing() -> None:
    pass


if TYPE_CHECKING:
    from hvkeras.typing import Callback as _Callback
else:
    _Callback = compat.default_keras().callbacks.Callback

RULES: dict[str, Callable[[float, int, int], float]] = {
    "keep": lambda rate, _before, _now: rate,
    "linear": lambda rate, before, now: rate * now / before,
    "sqrt": lambda rate, before, now: rate * (now / before) ** 0.5,
}


class ElasticCallback(KerasCallback):
    """Callback that makes `fit` elastic: training resumes from the last commit when ranks are lost or join.

    A commit holds the model, the optimizer, the epoch, and the position in the data of `hvd.shard`. It also holds the
    state of `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`, and the history, which `fit` returns for all
    epochs. After a change of ranks, `on_train_begin` of all callbacks is called again. The logs of an epoch in which
    ranks changed cover only the steps since the change.

    Example:
        model.fit(x, y, epochs=10, callbacks=[hvd.elastic.ElasticCallback(batches_per_commit=100)])

    Args:
        batches_per_commit: Batches between commits; None to commit only at the end of each epoch.
        learning_rate: Scaling of the learning rate with the number of ranks: "keep", "linear", "sqrt", or a function
            of the rate, the old size and the new size.

    Raises:
        UsageError: An argument is invalid, or the model has no weights when training begins.
    """

    def __init__(self, batches_per_commit: int | None = None,
                 learning_rate: str | Callable[[float, int, int], float] = "keep") -> None:
        super().__init__()
        if not callable(learning_rate) and learning_rate not in RULES:
            raise UsageError(explain("learning_rate must be keep, linear, sqrt or a function",
                                     'pass learning_rate="linear"', learning_rate=learning_rate))
        if batches_per_commit is not None and batches_per_commit < 1:
            raise UsageError(explain("batches_per_commit must be a positive number or None", "pass 100",
                                     batches_per_commit=batches_per_commit))
        self.batches_per_commit: int | None = batches_per_commit
        self._rule = learning_rate if callable(learning_rate) else RULES[learning_rate]

    def run_fit(self, fit: Callable[..., Any], model: ModelLike, given: dict[str, Any]) -> Any:
        """Run `fit` as an elastic function.

        Args:
            fit: Calls `fit` with the user's arguments, some of which are overridden by those passed to it.
            model: The model.
            given: The user's arguments of `fit`, by name.

        Returns:
            The return value of `fit`.
        """
        state: Any = TensorFlowKerasState(model, epoch=given["initial_epoch"], batch=0, ranks=size(), seen={},
                                          epochs=[], stopped=False)
        others = [callback for callback in _as_list(given["callbacks"]) if callback is not self]

        def train(state: Any) -> Any:
            self._scale_learning_rate(model, state)
            if state.stopped or state.epoch >= given["epochs"]:
                gather_optimizer(model)  # as `fit` does at its end
                return None
            return fit(initial_epoch=state.epoch, callbacks=[
                *others, UpdateEpochStateCallback(state), UpdateBatchStateCallback(state),
                _CallbackStates(state, others),
                CommitStateCallback(state, self.batches_per_commit)])

        history = run(train)(state)
        if history is None:  # all epochs were completed when a rank was lost
            history = getattr(model, "history", None) or compat.new_history(model)
        history.epoch = [epoch for epoch, _ in state.epochs]
        names = dict.fromkeys(name for _, logs in state.epochs for name in logs)
        history.history = {name: [logs[name] for _, logs in state.epochs if name in logs] for name in names}
        return history

    def _scale_learning_rate(self, model: Any, state: Any) -> None:
        before, now = state.ranks, size()
        state.ranks = now
        rate = compat.learning_rate(model.optimizer)
        if before != now and rate is not None:
            compat.set_learning_rate(model.optimizer, self._rule(rate, before, now))


class _CallbackStates(KerasCallback):
    """Callback to save the history, and save and restore the states of the other callbacks, in the elastic state."""

    def __init__(self, state: Any, others: list[Any]) -> None:
        super().__init__()
        self._state, self._others = state, others

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        backup_and_restore.restore(self._others, self._state.seen)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        values = {name: float(value) for name, value in (logs or {}).items()}
        self._state.epochs = [*self._state.epochs, (epoch, values)]
        self._state.seen = backup_and_restore.states_of(self._others)
        self._state.stopped = bool(self.model.stop_training)


def _as_list(callbacks: Any) -> list[Any]:
    callbacks = getattr(callbacks, "callbacks", callbacks)  # of a CallbackList
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
