"""Gradient weights: ranks without batches left in an epoch still participate in its steps, with weight 0."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
