"""Ranks that have no more batches in an epoch keep the others company, without weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.collectives.operations import Average, Sum
from hvkeras.collectives.reductions import allreduce
from hvkeras.job.process_sets import ProcessSet


class Joining:
    """This rank's weight in the next step: 1 on a batch of its own, 0 on one that only keeps company."""

    def __init__(self) -> None:
        self.active = False
        self._weight: Any = None

    def start(self) -> None:
        """Steps that are traced from now on weigh their gradients."""
        self.active = True
        if self._weight is None:
            self._weight = tf.Variable(1.0, trainable=False, name="hvkeras_weight")
        self._weight.assign(1.0)

    def stop(self) -> None:
        """Back to weight 1; steps that are traced from now on do not weigh."""
        self.active = False
        if self._weight is not None:
            self._weight.assign(1.0)

    def weigh(self, own: bool) -> None:
        """Says whether the next step is on a batch of this rank's own."""
        self._weight.assign(float(own))

    def weighed(self, gradients: Sequence[Any], op: int, process_set: ProcessSet) -> list[Any]:
        """Scales this rank's gradients, so that an average over all ranks is one over those with a weight.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None.
            op: How they are combined afterwards, Average or Sum.
            process_set: The ranks that take part.
        """
        factor = self._weight.read_value()
        if op == Average:
            total = allreduce(factor, op=Sum, name="the weights of ranks in a joined step", process_set=process_set)
            factor *= len(process_set.members()) / total
        return [_times(gradient, factor) for gradient in gradients]


joining = Joining()


def _times(gradient: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
