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

    Put it after the callbacks that update the state. A commit copies the whole model.

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
        if self.batches_per_commit and self._batches % self.batches_per_commit == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Commits."""
        self.commit()

    def commit(self) -> None:
        """Commits the state."""
        self.state.commit()


class UpdateBatchStateCallback(_Callback):  # type: ignore[misc]  # Keras ships no types
    """Keeps `state.batch` at the batch of the epoch that was trained last; 0 between epochs.

    `fit` begins every epoch at its first batch, also one that was interrupted: to leave out what was trained, read
    `state.batch` before, and pass fewer `steps_per_epoch` or a dataset that skips.

    Example:
        model.fit(dataset.skip(state.batch), callbacks=[hvd.elastic.UpdateBatchStateCallback(state)])

    Args:
        state: A state with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Notes the batch."""
        self.state.batch = batch

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
