"""A check of rules at run time: the whole function beside what the ranks make of it, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.collectives import Lanes
from hvkeras.partition.emission import Run
from hvkeras.partition.layouts import Divided, Partial
from hvkeras.partition.programs import Moments, Node

_DIGITS = 1e4  # of the last digit, by which rounding may make tensors differ


@dataclass(frozen=True)
class Difference:
    """A tensor that the ranks compute otherwise than one process.

    Args:
        operation: Type and name of the operation that makes it.
        line: The user's line that made the operation; empty if it is not known.
        layout: How the ranks hold the tensor.
        largest: The largest difference, in parts of the largest element of the tensor and of what it is computed from.
    """

    operation: str
    line: str
    layout: str
    largest: float

    def __str__(self) -> str:
        return f"{self.operation}{self.line and f', {self.line}'} ({self.layout}) differs by {self.largest:.1e}"


class Check:
    """Compares all tensors of a function with those of the same function in one process.

    What must not run twice, such as assignments and random numbers, runs only as the ranks do it together; its results
    are made whole. Sums of the ranks that are not made whole are not compared.

    Args:
        run: The operations that were created for the ranks.
        wholes: Inputs of the whole function, by their numbers.
    """

    def __init__(self, run: Run, wholes: dict[int, Lanes]) -> None:
        self._run, self._plan = run, run.plan
        self._wholes = dict(wholes)
        self._compared: list[tuple[Node, int]] = []

    def differences(self) -> Lanes:
        """Return the difference of each compared tensor, on each of the ranks whose functions are created."""
        lanes: list[list[tf.Tensor]] = [[] for _ in self._run.emission.units]
        for node, live in zip(self._plan.program.nodes, self._plan.live, strict=True):
            if live and node.operation.op_def.is_stateful:
                self._wholes.update((number, self._run.whole(number)) for number in node.outputs)
                continue
            given = [self._wholes[number] for number in node.inputs]
            create = Moments.create if isinstance(node.operation, Moments) else _create
            made = [create(node.operation, [operand[lane] for operand in given]) for lane in range(len(lanes))]
            for place, number in enumerate(node.outputs):
                self._wholes[number] = [outputs[place] for outputs in made]
                if live and self._is_compared(number):
                    self._compared.append((node, number))
                    for lane, found in enumerate(lanes):
                        found.append(self._difference(number, lane, [operand[lane] for operand in given]))
        largest = [tf.stack(found) if found else tf.zeros([0], tf.float64) for found in lanes]
        return self._run.emission.exchange("max", [largest])[0]

    def first(self, differences: Any) -> Difference | None:
        """Return the first tensor that differs by more than rounding; None if there is none.

        Args:
            differences: What `differences` returned, when it ran.
        """
        for (node, number), found in zip(self._compared, differences, strict=True):
            if not found <= _DIGITS * _last_digit(self._plan.program.tensors[number].dtype):
                return Difference(f"{node.type} {node.operation.name}", tensorflow_graphs.user_line(node.operation),
                                  str(self._plan.values[number].layout), float(found))
        return None

    def _is_compared(self, number: int) -> bool:
        dtype = self._plan.program.tensors[number].dtype
        return (dtype.is_floating or dtype.is_integer or dtype.is_bool) and not isinstance(
            self._plan.values[number].layout, Partial)

    def _difference(self, number: int, lane: int, given: Sequence[tf.Tensor]) -> tf.Tensor:
        value, wanted, own = self._plan.values[number], self._wholes[number][lane], self._run.made(number)[lane]
        units = self._run.emission.units[lane]
        if isinstance(value.layout, Divided):
            wanted = units.take(wanted, value, value.layout.division)
        scales = [tensor for tensor in given if tensor.dtype.is_floating]
        difference: tf.Tensor = self._run.emission.call(_relative_difference, [wanted, own, *scales])
        return difference


def _create(operation: Any, operands: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    return list(tensorflow_graphs.copied(operation, operands).outputs)


def _relative_difference(wanted: tf.Tensor, own: tf.Tensor, *scales: tf.Tensor) -> tf.Tensor:
    """Return the largest difference, in parts of the sum of the largest elements of what is wanted and of others."""
    wanted, own = tf.cast(wanted, tf.float64), tf.cast(own, tf.float64)
    scale = tf.add_n([_largest(tensor) for tensor in (wanted, *scales)])
    same = tf.logical_or(tf.equal(own, wanted), tf.logical_and(tf.math.is_nan(own), tf.math.is_nan(wanted)))
    return _largest(tf.where(same, tf.zeros_like(own), own - wanted)) / tf.maximum(scale, 1e-300)


def _largest(tensor: tf.Tensor) -> tf.Tensor:
    finite = tf.where(tf.math.is_finite(tensor), tf.abs(tensor), tf.zeros_like(tensor))
    return tf.cast(tf.reduce_max(tf.concat([tf.reshape(finite, [-1]), tf.zeros([1], tensor.dtype)], 0)), tf.float64)


def _last_digit(dtype: tf.DType) -> float:
    if dtype in (tf.float16, tf.float32, tf.float64):
        return float(np.finfo(dtype.as_numpy_dtype).eps)
    return 0.01 if dtype.is_floating else 0.0
