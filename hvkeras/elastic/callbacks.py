"""Keras callbacks that keep a state up to date during `fit`.

They derive from the callbacks of the Keras that is behind `tf.keras` when they are imported.
"""

from __future__ import annotations

from typing import Any, cast

from hvkeras import compat
from hvkeras.callbacks.base import KerasCallback
from hvkeras.data.accounts import keeps_accounts
from hvkeras.elastic.state import State
from hvkeras.typing import Logs, ModelLike


class CommitStateCallback(KerasCallback):
    """Commits a state every few batches, at the end of each epoch, and when a machine is being taken away (SIGTERM).

    Put it after the callbacks that update the state. A commit copies the whole model. To resume from a commit in the
    middle of an epoch, the state must contain the position in the epoch: see `UpdateBatchStateCallback`. Without it,
    `fit` restarts the epoch, and trains a second time on the batches before the commit.

    Example:
        model.fit(dataset, callbacks=[hvd.elastic.CommitStateCallback(state, batches_per_commit=100)])

    Args:
        state: The state.
        batches_per_commit: Batches between commits; None to commit only at the end of each epoch.
    """

    def __init__(self, state: State, batches_per_commit: int | None = 1) -> None:
        super().__init__()
        self.state: State = state
        self.batches_per_commit: int | None = batches_per_commit
        self.batches_remaining: int | None = batches_per_commit  # to the next commit
        self._may_commit_early = False

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Resets the count of batches."""
        self.batches_remaining = self.batches_per_commit
        # Else the batches before the commit would be trained a second time.
        self._may_commit_early = bool(self.batches_per_commit) or keeps_accounts() or hasattr(self.state, "batch")

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commits the state every `batches_per_commit` batches."""
        is_due = False
        if self.batches_remaining:
            self.batches_remaining -= 1
            is_due = not self.batches_remaining
            self.batches_remaining = self.batches_remaining or self.batches_per_commit
        last = batch + 1 == _steps(self)  # on_epoch_end commits, after updates at the epoch's end
        must = self._may_commit_early and self.state.must_commit()
        if (must or is_due) and not last:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commits the state at the end of an epoch."""
        self.commit()

    def commit(self) -> None:
        """Commits the state."""
        self.state.commit()


class UpdateBatchStateCallback(KerasCallback):
    """Keeps `state.batch` at the number of trained batches of the epoch (0 between epochs), where `fit` resumes.

    If `state.batch` is not 0 when `fit` begins, the first epoch skips that many batches: those that were trained before
    the commit. The data must therefore come in the same order again; pass `shuffle=False`, or a seed.

    Example:
        model.fit(dataset, callbacks=[hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(
            state, batches_per_commit=100)])

    Args:
        state: A state with an attribute `batch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self._begun = self._before = 0

    def set_model(self, model: ModelLike) -> None:
        """Stores the model, and installs the hooks for skipping batches before training begins."""
        super().set_model(model)
        compat.passes()

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Reads the position from the state."""
        self._before = int(self.state.batch)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Makes the first epoch resume at the position of the state."""
        done, self._before = self._before, 0
        if done and not keeps_accounts():  # else the data of fit begin by themselves where the commit was made
            compat.passes().at_next(lambda _: compat.Done(0, done, _nothing, _nothing))

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Records the batch number; the number that Keras passes at a batch's end differs between versions."""
        self._begun = batch

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Stores the number of trained batches in the state."""
        done, steps = self._begun + compat.steps_per_execution(self.model), _steps(self)
        self.state.batch = done if steps is None else min(done, steps)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Resets `state.batch` to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(KerasCallback):
    """Keeps `state.epoch` at the number of epochs trained over all calls of `fit`.

    Example:
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

    Args:
        state: A state with an attribute `epoch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state
        self.initial_epoch: int = cast(Any, state).epoch
        self._first = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Records how many epochs were trained before."""
        self.initial_epoch, self._first = self.state.epoch, -1

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Records the first epoch number of `fit`, which is its `initial_epoch`."""
        if self._first < 0:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Stores the number of trained epochs in the state."""
        self.state.epoch = self.initial_epoch + epoch - self._first + 1


def _steps(callback: Any) -> int | None:
    """Returns the number of steps per epoch, if Keras knows it."""
    steps: int | None = (callback.params or {}).get("steps")
    return steps


def _nothing() -> None:
    """Does nothing: no other action is needed once the completed batches have been skipped."""
