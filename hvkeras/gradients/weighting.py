"""Weights of ranks in a step: of ranks without batches left in an epoch, and of the rows of a batch of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.collectives.operations import Average, Sum
from hvkeras.collectives.reductions import allreduce
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import this_process


class Joining:
    """This rank's weight in the next step: 1 if it has a batch, 0 if it only participates for the other ranks."""

    def __init__(self) -> None:
        self.active: bool = False
        self._weight: Any = None

    def start(self) -> None:
        """Enable weighting for all steps that are traced from now on, with weight 1."""
        self.active = True
        if self._weight is None:
            self._weight = tf.Variable(1.0, trainable=False, name="hvkeras_weight")
        self._weight.assign(1.0)

    def stop(self) -> None:
        """Reset the weight to 1, and disable weighting for all steps that are traced from now on."""
        self.active = False
        if self._weight is not None:
            self._weight.assign(1.0)

    def set_weight(self, own: bool) -> None:
        """Set the weight of the next step: 1 if its batch is this rank's `own`, otherwise 0."""
        self._weight.assign(float(own))

    def weight(self) -> Any:
        """Return this rank's weight in the step, a float32 scalar, while weighting is enabled."""
        return self._weight.read_value()

    def apply_weights(self, gradients: Sequence[Any], op: int, process_set: ProcessSet,
                      overwritten: Collection[int] = ()) -> list[Any]:
        """Scale this rank's gradients, so that the average over all ranks equals the average over those with weight 1.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None.
            op: The following reduction, Average or Sum.
            overwritten: Indices of overwrites of variables, which reduce to the maximum.
        """
        mine = self._weight > 0.0
        factor = self._weight.read_value()
        if op == Average:
            total = allreduce(factor, op=Sum, name="the weights of ranks in a joined step", process_set=process_set)
            factor *= len(process_set.members()) / total
        return [tf.where(mine, gradient, gradient.dtype.min) if index in overwritten else _times(gradient, factor)
                for index, gradient in enumerate(gradients)]


def joining() -> Joining:
    """Return this rank's `Joining`."""
    return this_process().part(Joining)


def _times(gradient: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


@dataclass(frozen=True)
class RowShare:
    """Rows of a batch that this rank computes, while the other ranks compute the others.

    The loss of the batch is the sum of the ranks' losses, each times the rank's `share`, and so is its gradient.

    Attributes:
        share: The part of the batch's rows that this rank computes, a float64 scalar; the shares of all ranks sum to 1.
        has_rows: Boolean scalar; False if this rank computes a row that does not count, since there are too few.
        trains: Whether the step trains.
        reduces: Whether gradients are reduced where a tape computes them, instead of by the optimizer.
    """

    share: Any
    has_rows: Any
    trains: bool = False
    reduces: bool = False

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
        self.rows: RowShare | None = None  # in the step that is being traced or run; None outside of steps

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
