"""Batches of all ranks: whether every rank gets the same batches, and which rows of the current one it computes.

`hvkeras.global_batch` cuts the batches in the steps of models; losses, gradients and moments read here what it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.errors import UsageError, explain
from hvkeras.job.session import current_session, this_process

_TOLERANCE = 1e-4  # relative: equal data may differ in the last digits between processors


@dataclass(frozen=True)
class RowShare:
    """Rows of a batch that this rank computes, while the other ranks compute the others.

    The loss of the batch is the sum of the ranks' losses, each times the rank's `share`, and so is its gradient.

    Attributes:
        share: The part of the batch's rows that this rank computes, a float64 scalar; the shares of all ranks sum to 1.
        has_rows: Boolean scalar; False if this rank computes a row that does not count, since there are too few.
        trains: Whether the step trains.
        reduces: Whether gradients are reduced where a tape computes them, instead of by the optimizer.
        constants: The numbers of rows of the batch and of this rank, if tensors of a constant number of rows are to be
            made for this rank's rows.
    """

    share: Any
    has_rows: Any
    trains: bool = False
    reduces: bool = False
    constants: tuple[int, int] | None = None

    def times_share(self, value: Any) -> Any:
        """Return a tensor times the share."""
        return value * tf.cast(self.share, value.dtype)

    def divided_by_share(self, value: Any) -> Any:
        """Return a tensor divided by the share; 0 without rows."""
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    def counted(self, value: Any) -> Any:
        """Return a number; 0 without rows."""
        return tf.where(self.has_rows, value, tf.zeros_like(value))


class GlobalBatch:
    """Whether all ranks get the same batches (`hvkeras.global_batch`), and this rank's rows of the current one."""

    def __init__(self) -> None:
        self.started: bool = False
        self._is_whole: Callable[[], bool] = lambda: True
        self.rows: RowShare | None = None  # in the step that is being traced or run; None outside of steps
        self._deviation: Any = None

    @property
    def whole(self) -> bool:
        """Whether every rank gets the whole batch; otherwise its part of it."""
        return self._is_whole()

    def start(self) -> None:
        """Start: from now on, all ranks get the same batches."""
        self.started = True
        self._deviation = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="hvkeras_deviation")

    def ask(self, is_whole: Callable[[], bool]) -> None:
        """Let a function tell whether every rank gets the whole batch."""
        self._is_whole = is_whole

    def note_deviation(self, deviation: Any) -> None:
        """Note in a step how far this rank's batch is from the mean of all ranks' batches, relative to its values."""
        self._deviation.assign(tf.maximum(self._deviation, tf.cast(deviation, tf.float64)))

    def require_same_batches(self) -> None:
        """Check that all ranks have had the same batches in all steps so far.

        Raises:
            UsageError: This rank's batches differ from those of other ranks.
        """
        if self._deviation is not None and not self._deviation.numpy() <= _TOLERANCE:
            self._deviation.assign(0.0)
            raise UsageError(explain(
                "All ranks must get the same batches, since each computes a part of them", "seed what makes them:"
                " an unseeded numpy.random.default_rng() and other entropy of the operating system differ between"
                " processes; and remove deterministic=False from tf.data"))

    @contextlib.contextmanager
    def computing(self, rows: RowShare | None) -> Iterator[None]:
        """Enter a scope in which a step computes some rows of the batch."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = before


def global_batch() -> GlobalBatch:
    """Return this process's `GlobalBatch`."""
    return this_process().part(GlobalBatch)


def require_own_batches(function: str) -> None:
    """Check that a function of hvkeras is not used on the batches of all ranks.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: All ranks get the same batches, or their parts of them, which only `shard` may deal.
    """
    current_session()
    if global_batch().started and (global_batch().whole or function != "shard"):
        raise UsageError(explain("A script under --data-parallel or hvd.data_parallel() must be written for one process"
                                 ", and not distribute itself", "remove its lines of hvkeras or Horovod, or run it"
                                 " without --data-parallel", call=f"hvd.{function}"))
