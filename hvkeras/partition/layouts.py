"""Layouts: where the elements of a tensor are, when several ranks hold it together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from hvkeras.partition.sizes import Shape, Size, product, quotient


@dataclass(frozen=True)
class Division:
    """Units, such as the rows of a batch, of which each rank has a part; consecutive ranks have consecutive units.

    Args:
        name: Name; equal names mean the same units, divided in the same way.
        total: How many units there are, on all ranks together.
    """

    name: str
    total: Size


@dataclass(frozen=True)
class Replicated:
    """Each rank has the whole tensor."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Divided:
    """Each rank has its units of an axis, and all of the other axes.

    The axis consists of `outer` blocks, each of which has all units one after another, each unit with `each` elements.
    So an axis stays divided when a reshape merges it with its neighbours.

    Args:
        division: The units.
        axis: The axis.
        outer: Number of blocks.
        each: Number of elements of a unit in a block.
    """

    division: Division
    axis: int
    outer: Size = 1
    each: Size = 1

    @property
    def size(self) -> Size:
        """Size of the axis, of all ranks together."""
        return self.outer * self.division.total * self.each

    def at(self, axis: int) -> Divided:
        """Return this division of another axis."""
        return replace(self, axis=axis)

    def __str__(self) -> str:
        blocks = "" if self.outer == self.each == 1 else f" as [{self.outer}, {self.division.name}, {self.each}]"
        return f"divided by {self.division.name} along axis {self.axis}{blocks}"


@dataclass(frozen=True)
class Partial:
    """Each rank has a tensor of the whole shape, from which the tensor follows element by element.

    Args:
        reduction: "sum", "max" or "min".
        division: The units from which the ranks' tensors were computed. A rank without units has computed with those of
            another rank, and does not count in a sum. None: all ranks count.
    """

    reduction: str = "sum"
    division: Division | None = None

    def __str__(self) -> str:
        return f"partial ({self.reduction})"


TensorLayout: TypeAlias = "Replicated | Divided | Partial"


@dataclass(frozen=True)
class ListOf:
    """Each rank has a list (of TensorFlow's `TensorList` operations) of as many tensors.

    Args:
        elements: Layout of each element, which may be a list itself; None while the list has none.
    """

    elements: Layout | None = None

    def __str__(self) -> str:
        return f"list, each element {self.elements}"


Layout: TypeAlias = "Replicated | Divided | Partial | ListOf"

REPLICATED = Replicated()


def whole(layout: Layout) -> Layout:
    """Return the layout of whole tensors, or of a list of whole tensors."""
    return ListOf(whole(layout.elements or REPLICATED)) if isinstance(layout, ListOf) else REPLICATED


def innermost(layout: Layout) -> TensorLayout:
    """Return the layout of a tensor, or of the tensors in a list, in lists of lists as well."""
    while isinstance(layout, ListOf):
        layout = layout.elements or REPLICATED
    return layout


def is_resolved(layout: Layout, needed: Layout) -> bool:
    """Return whether a tensor must be made whole, by a collective, before it can be in another layout."""
    if isinstance(layout, ListOf):
        assert isinstance(needed, ListOf)
        return layout.elements is not None and needed.elements is not None and is_resolved(
            layout.elements, needed.elements)
    if layout == needed or isinstance(layout, Replicated):
        return False
    return not (isinstance(layout, Partial) and isinstance(needed, Partial))


def joined(layout: Layout, other: Layout) -> Layout | None:
    """Return the layout that tensors in either of two layouts get without a collective; None if there is none."""
    if isinstance(layout, ListOf) and isinstance(other, ListOf):
        if layout.elements is None or other.elements is None:
            return other if layout.elements is None else layout
        elements = joined(layout.elements, other.elements)
        return None if elements is None else ListOf(elements)
    if layout == other or isinstance(layout, Replicated):
        return other
    if isinstance(other, Replicated):
        return layout
    if isinstance(layout, Partial) and isinstance(other, Partial) and layout.reduction == other.reduction:
        return Partial(layout.reduction)
    return None


def reshaped(layout: Divided, shape: Shape, result: Shape) -> Divided | None:
    """Return the layout of a reshaped tensor, whose elements stay where they are.

    As many elements are before the units in both tensors; so there are behind them, known or not.

    Args:
        layout: Layout of the tensor.
        shape: Shape of the tensor.
        result: Shape of the result.

    Returns:
        The layout of the result; None where an axis of it contains only a part of the units, or sizes up to it are not
        known.
    """
    leading = shape[:layout.axis]
    if None in leading:
        return None
    before: Size | None = product(size for size in leading if size is not None) * layout.outer
    for axis, size in enumerate(result):
        if size is None or before is None:
            return None
        each = quotient(size, before * layout.division.total)
        if each is not None:
            return Divided(layout.division, axis, before, each)
        before = quotient(before, size)
    return None
