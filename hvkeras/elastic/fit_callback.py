"""`ElasticCallback`: makes one call of `fit` elastic, without a state or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvkeras import compat
from hvkeras.callbacks import callback_states
from hvkeras.callbacks.base import KerasCallback
from hvkeras.elastic.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from hvkeras.elastic.running import run
from hvkeras.elastic.tensorflow_state import TensorFlowKerasState
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.optimizer import gather_optimizer
from hvkeras.job.queries import size
from hvkeras.typing import Logs, ModelLike

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
    """Makes `fit` go on when ranks are lost or join, from the last commit.

    A commit holds the model, the optimizer, the epoch, the position in the data that `hvd.shard` has dealt, what
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` have seen, and the history, which `fit` returns for all
    epochs. Callbacks begin anew after a change (`on_train_begin`). The logs of an epoch in which ranks have changed
    cover the steps since then.

    Example:
        model.fit(x, y, epochs=10, callbacks=[hvd.elastic.ElasticCallback(batches_per_commit=100)])

    Args:
        batches_per_commit: Batches between commits; None to commit only at the end of each epoch.
        learning_rate: How the learning rate follows the number of ranks: "keep", "linear" (proportional), "sqrt", or a
            function of the rate, the former number and the present one.

    Raises:
        UsageError: An argument is wrong; or, when training begins, the model has no weights yet.
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
        """Runs a call of `fit` as an elastic function.

        Args:
            fit: Calls `fit` with the arguments that the user gave, but those passed to it.
            model: The model.
            given: The arguments of `fit`, by name.

        Returns:
            What `fit` returns.
        """
        state: Any = TensorFlowKerasState(model, epoch=given["initial_epoch"], batch=0, ranks=size(), seen={},
                                          epochs=[], stopped=False)
        others = [callback for callback in _listed(given["callbacks"]) if callback is not self]

        def train(state: Any) -> Any:
            self._follow(model, state)
            if state.stopped or state.epoch >= given["epochs"]:
                gather_optimizer(model)  # as `fit` would have done at its end
                return None
            return fit(initial_epoch=state.epoch, callbacks=[
                *others, UpdateEpochStateCallback(state), UpdateBatchStateCallback(state), _Seen(state, others),
                CommitStateCallback(state, self.batches_per_commit)])

        history = run(train)(state)
        if history is None:  # all had been trained when a rank was lost
            history = getattr(model, "history", None) or compat.new_history(model)
        history.epoch = [epoch for epoch, _ in state.epochs]
        names = dict.fromkeys(name for _, logs in state.epochs for name in logs)
        history.history = {name: [logs[name] for _, logs in state.epochs if name in logs] for name in names}
        return history

    def _follow(self, model: Any, state: Any) -> None:
        """Adapts the learning rate of a commit to the number of ranks."""
        before, now = state.ranks, size()
        state.ranks = now
        rate = compat.learning_rate(model.optimizer)
        if before != now and rate is not None:
            compat.set_learning_rate(model.optimizer, self._rule(rate, before, now))


class _Seen(KerasCallback):
    """Keeps what the other callbacks have seen, and the history, in the state; restores the former."""

    def __init__(self, state: Any, others: list[Any]) -> None:
        super().__init__()
        self._state, self._others = state, others

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        callback_states.restore(self._others, self._state.seen)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        kept = {name: float(value) for name, value in (logs or {}).items()}
        self._state.epochs = [*self._state.epochs, (epoch, kept)]
        self._state.seen = callback_states.states_of(self._others)
        self._state.stopped = bool(self.model.stop_training)


def _listed(callbacks: Any) -> list[Any]:
    found = getattr(callbacks, "callbacks", callbacks)
    return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
