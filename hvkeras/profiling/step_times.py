"""When training steps ran, and on how many samples: timestamps recorded in the graphs of steps and in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.profiling.ring_buffer import Array, ring


class StepStamps:
    """The timestamps that training steps write, in variables on the CPU.

    Args:
        capacity: How many of the latest steps are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._samples = graphs.lasting_variable(0, tf.int64, "hvkeras_recorded_samples")
        self._came = graphs.lasting_variable(0.0, tf.float64, "hvkeras_batch_came")
        self._steps = ring("hvkeras_recorded_steps", 4, capacity)

    def batch_came(self, rows: Any, inputs: Sequence[Any]) -> None:
        """Counts the samples of a batch that a model is called on, and records when its tensors are available."""
        with tf.device("CPU:0"):
            count = tf.cast(rows, tf.int64)
            with tf.control_dependencies(inputs):
                self._came.assign(graphs.now(), read_value=False)
                self._samples.assign_add(count, read_value=False)

    def ready(self, gradients: Sequence[Any], kind: int) -> None:
        """Ends a step of this kind once its gradients are computed."""
        with tf.device("CPU:0"), tf.control_dependencies(gradients):
            samples = tf.cast(self._samples.read_value(), tf.float64)
            number = tf.constant(kind, tf.float64)
            self._steps.append([graphs.now(), samples, number, self._came.read_value()])
            self._came.assign(0.0, read_value=False)

    def rows(self) -> tuple[Array, int]:
        """The latest steps in the format of `Record.stamps`, and the index of the first of them."""
        return self._steps.rows()
