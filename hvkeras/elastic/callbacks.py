"""Keras callbacks that keep a state up to date while `fit` trains.

They derive from the callbacks of the Keras that `tf.keras` is when they are imported.
"""

from __future__ import annotations

from typing import Any

from hvkeras import compat
from hvkeras.elastic.state import State

_Callback: Any = compat.default_keras().callbacks.Callback


class CommitStateCallback(_Callback):  # type: ignore[misc]  # Keras ships no types
    """Commits a state every few batches, and at the end of each epoch.

    Put it after the callbacks that update the state. A commit copies the whole model. To go on from one amid an epoch,
    the state must know how far the epoch was: see `UpdateBatchStateCallback`. Without that `fit` begins the epoch anew,
    and trains on what came before the commit once more.

    Example:
        model.fit(dataset, callbacks=[hvd.elastic.CommitStateCallback(state, batches_per_commit=100)])

    Args:
        state: The state.
        batches_per_commit: Batches between commits; None for commits at the ends of epochs alone.
    """

    def __init__(self, state: State, batches_per_commit: int | None = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Counts from 0 again."""
        self._batches = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commits, every so many batches."""
        self._batches += 1
        last = batch + 1 == _steps(self)  # what belongs to the epoch's end comes before its commit
        if self.batches_per_commit and self._batches % self.batches_per_commit == 0 and not last:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commits."""
        self.commit()

    def commit(self) -> None:
        """Commits the state."""
        self.state.commit()


class UpdateBatchStateCallback(_Callback):  # type: ignore[misc]  # Keras ships no types
    """Keeps `state.batch` at how many batches of the epoch were trained, 0 between epochs, and has `fit` go on there.

    Where `state.batch` is not 0 when `fit` begins, its first epoch leaves out as many batches: those that were trained
    before the commit. So the data must come in the same order again; pass `shuffle=False`, or a seed.

    Example:
        model.fit(dataset, callbacks=[hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(
            state, batches_per_commit=100)])

    Args:
        state: A state with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._begun = self._before = 0

    def set_model(self, model: Any) -> None:
        """Keeps the model, before training begins."""
        super().set_model(model)
        compat.hook_skipping()

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Looks where the state is."""
        self._before = int(self.state.batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Has the first epoch go on there."""
        done, self._before = self._before, 0
        if done:
            compat.at_next_pass(lambda _: compat.Done(0, done, _nothing, _nothing))

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Counts; the number that Keras gives a batch's end differs between versions."""
        self._begun = batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Notes how many batches were trained."""
        done, steps = self._begun + compat.steps_per_execution(self.model), _steps(self)
        self.state.batch = done if steps is None else min(done, steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Begins at 0 again."""
        self.state.batch = 0


class UpdateEpochStateCallback(_Callback):  # type: ignore[misc]  # Keras ships no types
    """Keeps `state.epoch` at the number of epochs that were trained, over all calls of `fit`.

    Example:
        model.fit(dataset, epochs=10 - state.epoch, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

    Args:
        state: A state with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Keeps how many epochs were trained before."""
        self._before, self._first = self.state.epoch, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Notices where `fit` counts from, which its `initial_epoch` says."""
        if self._first < 0:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Counts."""
        self.state.epoch = self._before + epoch - self._first + 1


def _steps(callback: Any) -> int | None:
    """The steps of an epoch, if Keras knows them."""
    steps: int | None = (callback.params or {}).get("steps")
    return steps


def _nothing() -> None:
    """What else is to be done when the batches before are behind."""
