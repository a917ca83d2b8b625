"""Decisions: how the ranks carry out an operation together.

A rule says which ways there are; here one of them is chosen, for the layouts that the operands have. What no rule
divides is computed by each rank from whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvkeras.partition.integers import Integers
from hvkeras.partition.layouts import REPLICATED, Divided, Division, Layout, ListOf, Partial, Replicated, whole
from hvkeras.partition.patterns import SHAPE, WHOLE, Pattern
from hvkeras.partition.sizes import Polynomial, Shape, Size, product, value_of


@dataclass(frozen=True)
class Value:
    """What is known of a tensor, of all ranks together.

    Args:
        layout: Its layout.
        shape: Its shape, or that of each element of a list; None if not even the number of dimensions is known.
        integers: Its elements, or those of each element of a list, if they are integers that follow from shapes.
        level: How many collectives precede it, one after another.
        element_type: Type of the elements of a list.
        sizes_of: Layout of the tensor whose sizes the integers are, if it is known.
    """

    layout: Layout = REPLICATED
    shape: Shape | None = None
    integers: Integers | None = None
    level: int = field(default=0, compare=False)
    element_type: Any = field(default=None, compare=False)
    sizes_of: Layout | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Own:
    """A number of elements that depends on the rank: a multiple of its units.

    Args:
        division: The units.
        times: Number of elements of a unit.
    """

    division: Division
    times: Size = 1


Vector: TypeAlias = "tuple[Size | Own | None, ...]"
"""Integers that an operation is given in place of an operand; None: as in the operand."""


@dataclass(frozen=True)
class Decision:
    """How the ranks carry out an operation.

    Args:
        operands: The layout in which each operand must be.
        results: What is known of each result.
        vectors: Operands that are made of sizes, by their numbers: what a rule has read, and what depends on the rank.
        create: What a rank does, if it is not the operation itself: a function of the operation, the rank's operands
            and an object that makes tensors of sizes; it returns the results.
        create_together: What all ranks whose functions are in a graph do together, where the operation calls functions:
            a function of the emission, the operation, and each operand of the ranks.
        plans: Plans of the functions that the operation calls.
        communicates: Whether what the ranks do together takes collectives, beside those of plans.
        takes_operands: Whether the results are computed from the operands, and not only from sizes.
    """

    operands: tuple[Layout, ...]
    results: tuple[Value, ...]
    vectors: Mapping[int, Vector] = field(default_factory=dict)
    create: Callable[..., Sequence[Any]] | None = None
    create_together: Callable[..., Sequence[Any]] | None = None
    plans: tuple[Any, ...] = ()
    communicates: bool = False
    takes_operands: bool = True

    def takes(self, operand: int) -> bool:
        """Return whether the operation is given an operand as it is when it runs."""
        return self.takes_operands and None in self.vectors.get(operand, (None,))


class Call:
    """An operation with what is known of its operands: what a rule sees.

    Args:
        operation: The operation of TensorFlow.
        operands: What is known of its operands.
        uses: How many operations take each operand.
        plan: A function that analyses a function which the operation calls: of its graph, what is known of its inputs,
            and the layouts that its results must have (None: as they become).
        name: A name that no other operation has, in none of the functions that are partitioned together.

    Attributes:
        wanted: What all that take the only result take of it, if that is known.
    """

    def __init__(self, operation: Any, operands: Sequence[Value], uses: Sequence[int],
                 plan: Callable[[Any, Sequence[Value], Sequence[Layout] | None], Any], name: str) -> None:
        self.operation, self.name = operation, name
        self.operands: tuple[Value, ...] = tuple(operands)
        self.uses: tuple[int, ...] = tuple(uses)
        self.vectors: dict[int, Vector] = {}
        self.wanted: Divided | None = None
        self.plan: Callable[[Any, Sequence[Value], Sequence[Layout] | None], Any] = plan

    @property
    def type(self) -> str:
        """Type of the operation."""
        return str(self.operation.type)

    def attribute(self, name: str) -> Any:
        """Return an attribute of the operation; bytes as text."""
        value = self.operation.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def shape(self, operand: int) -> Shape | None:
        """Return the shape of an operand, of all ranks together."""
        return self.operands[operand].shape

    def rank(self, operand: int) -> int | None:
        """Return the number of dimensions of an operand."""
        shape = self.shape(operand)
        return None if shape is None else len(shape)

    def entries(self, operand: int) -> np.ndarray | None:
        """Read integers of an operand: numbers, polynomials in rows, None where one is not known.

        The ranks are given what was read, whatever the operand is when they run.

        Returns:
            The integers; None if not even their number is known.
        """
        integers = self.operands[operand].integers
        if integers is None:
            return None
        if len(integers.shape) <= 1:
            self.vectors[operand] = integers.entries
        return integers.array

    def sizes(self, operand: int) -> np.ndarray | None:
        """Read integers of an operand; None if one of them is not known."""
        read = self.entries(operand)
        return None if read is None or None in read.ravel().tolist() else read

    def numbers(self, operand: int) -> np.ndarray | None:
        """Read integers of an operand; None if one of them is not known, or depends on rows."""
        read = self.sizes(operand)
        if read is None or any(isinstance(entry, Polynomial) for entry in read.ravel()):
            return None
        return read.astype(np.int64)

    def axis(self, operand: int, dimensions: int) -> int | None:
        """Read an axis from an operand; count it from the front.

        Args:
            operand: Number of the operand.
            dimensions: Number of dimensions that the axis is one of.
        """
        read = self.numbers(operand)
        return None if read is None or read.size != 1 else int(read.ravel()[0]) % dimensions


Rule: TypeAlias = Callable[[Call], "Pattern | Decision | None"]


def decide(call: Call, rule: Rule | None) -> Decision:
    """Decide how the ranks carry out an operation.

    Args:
        call: The operation.
        rule: The rule of its type.
    """
    found = None if rule is None else rule(call)
    if found is None:
        return computed_by_all(call)
    if isinstance(found, Decision):
        return found
    return by_pattern(call, found)


def computed_by_all(call: Call, shapes: Sequence[Shape | None] | None = None) -> Decision:
    """Return the decision that each rank carries out the whole operation.

    Args:
        call: The operation.
        shapes: Shapes of the results, if they are known.
    """
    operands = tuple(whole(value.layout) for value in call.operands)
    number = len(call.operation.outputs)
    return Decision(operands, tuple(Value(REPLICATED, shape) for shape in shapes or [None] * number))


def by_pattern(call: Call, pattern: Pattern) -> Decision:
    """Decide how to divide an operation that has a pattern.

    Partial sums stay so if they may; else as little as possible is gathered.
    """
    layouts = [value.layout for value in call.operands]
    shapes = [pattern.shape_of(number) for number in range(len(pattern.results))]
    if all(isinstance(layout, Replicated) for layout in layouts):
        return computed_by_all(call, shapes)
    partial = _kept_partial(call, pattern, shapes)
    if partial is not None:
        return partial
    best: tuple[float, Decision] | None = None
    for value, letters in zip(call.operands, pattern.operands, strict=True):
        if isinstance(value.layout, Divided) and not isinstance(letters, str):
            found = divided(call, pattern, letters[value.layout.axis], value.layout)
            if found is not None:
                cost = _cost(call, found)
                if best is None or cost < best[0]:
                    best = cost, found
    return computed_by_all(call, shapes) if best is None else best[1]


def divided(call: Call, pattern: Pattern, letter: str | None, layout: Divided) -> Decision | None:
    """Return the decision to divide an operation along a letter of its pattern.

    Args:
        call: The operation.
        pattern: Its pattern.
        letter: The letter.
        layout: How the dimension of that letter is divided; the axis does not matter.

    Returns:
        The decision; None if the operation cannot be divided so.
    """
    if not pattern.may_divide(letter):
        return None
    assert letter is not None
    operands = _divided_operands(call, pattern, letter, layout)
    if operands is None:
        return None
    results: list[Value] = []
    for number, letters in enumerate(pattern.results):
        if letter in letters:
            if letters.count(letter) > 1:
                return None
            results.append(Value(layout.at(letters.index(letter)), pattern.shape_of(number)))
        else:
            assert pattern.reduction is not None
            results.append(Value(Partial(pattern.reduction, layout.division), pattern.shape_of(number)))
    vectors = dict(call.vectors)
    if SHAPE in pattern.operands:
        vectors[pattern.operands.index(SHAPE)] = _own_sizes(results[0].layout, pattern.shape_of(0))
    if pattern.own is not None:
        vectors.update(pattern.own(letter, layout))
    return Decision(operands, tuple(results), vectors)


def _divided_operands(call: Call, pattern: Pattern, letter: str, layout: Divided) -> tuple[Layout, ...] | None:
    """Return the layouts of operands that are divided along a letter; None if one cannot be."""
    operands: list[Layout] = []
    for value, letters in zip(call.operands, pattern.operands, strict=True):
        if isinstance(letters, str) or letter not in letters:
            operands.append(REPLICATED)
            continue
        axis = letters.index(letter)
        assert value.shape is not None
        if letters.count(letter) > 1 or value.shape[axis] != layout.size:
            return None
        operands.append(layout.at(axis))
    return tuple(operands)


def own_shape(value: Value) -> Vector | None:
    """Return the shape that a rank's part of a tensor has; None if it is not known."""
    return None if value.shape is None or None in value.shape else _own_sizes(value.layout, value.shape)


def _own_sizes(layout: Layout, shape: Shape) -> Vector:
    own: list[Any] = list(shape)
    if isinstance(layout, Divided):
        own[layout.axis] = Own(layout.division, layout.outer * layout.each)
    return tuple(own)


def static_shape(value: Value) -> tf.TensorShape:
    """Return what is known of the shape of a rank's part of a tensor when its function is created."""
    if value.shape is None or isinstance(value.layout, ListOf):
        return tf.TensorShape(None)
    divided_axis = value.layout.axis if isinstance(value.layout, Divided) else None
    return tf.TensorShape([size if isinstance(size, int) and axis != divided_axis else None
                           for axis, size in enumerate(value.shape)])


def elements(shape: Shape | None) -> float:
    """Estimate the number of elements of a tensor, to compare costs: sources have some hundred rows."""
    if shape is None:
        return 1e9
    size = product(1 if dimension is None else dimension for dimension in shape)
    return value_of(size, dict.fromkeys(size.symbols, 256)) if isinstance(size, Polynomial) else size


def _cost(call: Call, decision: Decision) -> float:
    """Estimate how many elements are sent until the results are whole or divided."""
    moved = sum(elements(value.shape) for value, needed in zip(call.operands, decision.operands, strict=True)
                if value.layout != needed and not isinstance(value.layout, Replicated))
    return moved + sum(elements(value.shape) for value in decision.results if isinstance(value.layout, Partial))


def _kept_partial(call: Call, pattern: Pattern, shapes: Sequence[Shape]) -> Decision | None:
    """Return the decision to keep partial sums, which are reduced later, and then all at once."""
    layouts = [value.layout for value in call.operands]
    partial = [number for number, layout in enumerate(layouts) if isinstance(layout, Partial)]
    kinds = {layout for layout in layouts if isinstance(layout, Partial)}
    if len(kinds) != 1 or any(isinstance(layout, Divided | ListOf) for layout in layouts):
        return None
    kind, together = kinds.pop(), _linear_together(pattern, partial)
    if kind.reduction != "sum" or together is None or not _may_wait(call, partial, shapes):
        return None
    return Decision(tuple(kind if number in together else REPLICATED for number in range(len(layouts))),
                    tuple(Value(kind, shape) for shape in shapes), dict(call.vectors))


def _may_wait(call: Call, partial: Sequence[int], shapes: Sequence[Shape]) -> bool:
    """Return whether partial sums may be reduced behind an operation rather than before it.

    Sums that several operations take are reduced at their source, as those whose results would be larger, and those
    that meet what waits for a collective, in which they can take part.
    """
    size = sum(elements(call.shape(number)) for number in partial)
    is_shared = any(call.uses[number] > 1 for number in partial)
    level = max(call.operands[number].level for number in partial)
    return not is_shared and sum(map(elements, shapes)) <= 4 * size + 64 and all(
        value.level <= level for value in call.operands)


def _linear_together(pattern: Pattern, partial: Sequence[int]) -> tuple[int, ...] | None:
    """Return the operands that must be partial sums together, or None if results are not linear in the partial ones."""
    if pattern.linear == "each":
        return tuple(partial) if len(partial) == 1 else None
    together = pattern.linear
    if isinstance(together, str):
        together = tuple(number for number, letters in enumerate(pattern.operands) if letters not in (WHOLE, SHAPE))
    return together if set(partial) <= set(together) else None


def with_layout(value: Value, layout: Layout) -> Value:
    """Return what is known of a tensor in another layout."""
    return replace(value, layout=layout)
