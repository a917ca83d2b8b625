"""Brute force: a function of whole tensors beside the same function of parts of them, for every layout of its operands.

Values are multiples of 1/8, so that sums of parts are exact.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.partition.layouts import REPLICATED, Divided, Division, Layout, Partial
from hvkeras.partition.sizes import Size, quotient, rows, value_of

B = rows("rows")
ROWS = Division("rows", B)


@dataclass(frozen=True)
class Operand:
    """An operand of a case: its shape, and how its values are made.

    Args:
        shape: Its shape; sizes with `B` are not known when the function is traced.
        make: A function of a generator of random numbers and a shape; it returns the values.
        partial: Whether its values may be a sum of those of the ranks.
    """

    shape: Sequence[Size]
    make: Callable[[np.random.Generator, Sequence[int]], np.ndarray]
    partial: bool = False

    @property
    def dtype(self) -> tf.DType:
        """Type of its values."""
        return tf.as_dtype(self.make(np.random.default_rng(0), [1] * len(self.shape)).dtype)


@dataclass(frozen=True)
class Case:
    """A function, most often of one operation, that the ranks carry out in every layout of its operands.

    Args:
        function: A function of tensors.
        operands: Its operands. Every dimension that could hold rows does in some case.
        gathers: Whether rows meet rows, so that a batch must be gathered: operands whose first axis of rows is divided,
            all others whole. If not, nothing may be.
        tolerance: Relative difference of results that is rounding; None: what their type suggests.
    """

    function: Callable[..., Any]
    operands: Sequence[Operand]
    gathers: bool = False
    tolerance: float | None = None


def operation(type_: str, **attributes: Any) -> Callable[..., Any]:
    """Return a function that creates an operation.

    Args:
        type_: Type of the operation.
        attributes: Its attributes, or operands, by name.
    """
    create = getattr(tf.raw_ops, type_)
    names = [name for name in inspect.signature(create).parameters if name not in attributes]

    def created(*tensors: Any) -> Any:
        made = create(**dict(zip(names, tensors, strict=False)), **attributes)
        return list(made) if isinstance(made, list | tuple) else made

    return created


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the gradients of half the sum of squares of a function."""

    def differentiated(*tensors: Any) -> Any:
        results = [result for result in tf.nest.flatten(function(*tensors)) if result.dtype.is_floating]
        wanted = [tensor for tensor in tensors if tensor.dtype.is_floating]
        found = tf.gradients(tf.add_n([tf.reduce_sum(result * result) / 2 for result in results]), wanted)
        return [tf.convert_to_tensor(gradient) for gradient in found if gradient is not None]

    return differentiated


def eighths(generator: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return random multiples of 1/8 between -4 and 4."""
    return generator.integers(-32, 33, shape) / 8


def real(*shape: Size, dtype: str = "float64") -> Operand:
    """Return an operand of floating point numbers."""
    return Operand(shape, lambda generator, sizes: eighths(generator, sizes).astype(dtype), partial=True)


def distinct(*shape: Size, dtype: str = "float64") -> Operand:
    """Return an operand of multiples of 1/8, no two of which are equal."""
    return Operand(
        shape,
        lambda generator, sizes: (generator.permutation(math.prod(sizes)) / 8 - 9).reshape(sizes).astype(dtype),
        partial=True,
    )


def between(least: float, most: float, *shape: Size, dtype: str = "float64") -> Operand:
    """Return an operand of multiples of 1/8 between two."""
    return Operand(
        shape,
        lambda generator, sizes: (generator.integers(int(least * 8), int(most * 8) + 1, sizes) / 8).astype(dtype),
        partial=True,
    )


def above_zero(*shape: Size, dtype: str = "float64") -> Operand:
    """Return an operand of positive numbers."""
    return between(1 / 8, 4, *shape, dtype=dtype)


def indices(below: int, *shape: Size, dtype: str = "int32") -> Operand:
    """Return an operand of integers from 0."""
    return Operand(shape, lambda generator, sizes: np.asarray(generator.integers(0, below, sizes)).astype(dtype))


def integers(*shape: Size, dtype: str = "int32") -> Operand:
    """Return an operand of integers of either sign."""
    return Operand(
        shape, lambda generator, sizes: np.asarray(generator.integers(-9, 10, sizes)).astype(dtype), partial=True
    )


def truths(*shape: Size) -> Operand:
    """Return an operand of truth values."""
    return Operand(shape, lambda generator, sizes: np.asarray(generator.integers(0, 2, sizes)).astype(bool))


def layouts_of(operand: Operand) -> Iterator[Layout]:
    """Yield every layout that an operand may have, whole first."""
    yield REPLICATED
    for axis, size in enumerate(operand.shape):
        times = quotient(size, B)
        if isinstance(times, int):
            yield from (
                Divided(ROWS, axis, outer, times // outer) for outer in range(1, times + 1) if times % outer == 0
            )
        elif times is not None:
            yield from (Divided(ROWS, axis, times, 1), Divided(ROWS, axis, 1, times))
    if operand.partial:
        yield Partial("sum", ROWS)


Combination = tuple[Layout, ...]


def batch(case: Case) -> Combination:
    """Return the layouts of a batch: operands whose first axis of rows is divided, all others whole."""
    return tuple(
        next((layout for layout in layouts_of(operand) if isinstance(layout, Divided)), REPLICATED)
        for operand in case.operands
    )


def combinations(case: Case, at_most: int | None = None) -> list[Combination]:
    """Return combinations of layouts of the operands of a case.

    Args:
        case: The case.
        at_most: How many; of more, the batch, and others at equal distances. None: all.
    """
    first = batch(case)
    rest = [
        layouts
        for layouts in itertools.product(*(list(layouts_of(operand)) for operand in case.operands))
        if layouts != first and (set(layouts) != {REPLICATED} or len(case.operands) == 0)
    ]
    if at_most is not None:
        rest = rest[:: max(1, -(-len(rest) // (at_most - 1)))]
    return [first, *rest]


def parts_of(
    array: np.ndarray, layout: Layout, number: int, size: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return the part of each rank of an array.

    Args:
        array: The array.
        layout: Its layout.
        number: How many rows there are.
        size: How many ranks.
        generator: Source of parts of a sum.
    """
    if isinstance(layout, Divided):
        outer, each = (value_of(times, {"rows": number}) for times in (layout.outer, layout.each))
        axis = layout.axis
        blocks = array.reshape(*array.shape[:axis], outer, number, each, *array.shape[axis + 1 :])
        parts = []
        for rank in range(size):
            first = number // size * rank + min(number % size, rank)
            own = number // size + (number % size > rank)
            part = blocks.take(range(first, first + own) if own else [number - 1], axis + 1)
            parts.append(part.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :]))
        return parts
    if isinstance(layout, Partial):
        counted = min(number, size)
        parts = [eighths(generator, array.shape).astype(array.dtype) for _ in range(size)]
        parts[0] = array - sum(parts[1:counted], np.zeros_like(array))
        return parts
    return [array] * size


def whole_of(parts: Sequence[np.ndarray], layout: Layout, number: int) -> np.ndarray:
    """Return the array of which ranks have parts; those of a rank without rows do not count.

    Args:
        parts: The part of each rank.
        layout: The layout.
        number: How many rows there are.
    """
    size = len(parts)
    if isinstance(layout, Divided):
        numbers = dict.fromkeys(getattr(layout.division.total, "symbols", ()), number)
        outer, each = (value_of(times, numbers) for times in (layout.outer, layout.each))
        shape, axis = parts[0].shape, layout.axis
        blocks = [
            part.reshape(
                *shape[:axis], outer, max(1, number // size + (number % size > rank)), each, *shape[axis + 1 :]
            )
            for rank, part in enumerate(parts)
        ]
        return np.concatenate(blocks[:number], axis + 1).reshape(
            *shape[:axis], outer * number * each, *shape[axis + 1 :]
        )
    assert isinstance(layout, Partial)
    reduce = {"sum": np.sum, "max": np.max, "min": np.min}[layout.reduction]
    counted = parts[:number] if layout.reduction == "sum" and layout.division is not None else parts
    with np.errstate(all="ignore"):  # infinite parts
        return np.asarray(reduce(counted, 0)).astype(parts[0].dtype)
