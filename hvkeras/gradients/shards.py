"""The parts of variables that each rank updates, where the ranks share an optimizer's update.

Optimizers that treat each element by itself get parts of the buckets in which gradients are reduced: each bucket is cut
into as many pieces of equal size as there are ranks, so that each rank reduces, updates and sends as much of it as the
others. Few variables lie across a cut. Optimizers that look at a whole variable get whole variables, the largest first,
each on the rank that has the least by then (docs/decisions/sharded-update.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.gradients.reducer import pack

Bounds = tuple[int, ...]  # the rank at index r of a process set has elements [bounds[r], bounds[r + 1])

ALIGNED = 64  # bytes to which cuts are rounded, so that TensorFlow can slice without a copy
ROUGH = 50  # a cut is between two rows where a row is less than this fraction of a rank's part of the bucket
SLIVER = 200  # and at the end of a variable where that is nearer than this fraction of it


@dataclass(frozen=True)
class Extent:
    """How large a variable is, and whether it may be cut.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        itemsize: The bytes of an element.
        may_be_cut: Whether several ranks may have a part of it.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    may_be_cut: bool = True

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The number of elements of one of its rows."""
        return math.prod(self.shape[1:])


def by_elements(extents: Sequence[Extent], ranks: int, limit: int) -> list[Bounds]:
    """Assigns parts of variables, so that each rank has an equal part of each bucket.

    Example:
        >>> by_elements([Extent((8, 4), "float32", 4), Extent((64,), "float32", 4)], 2, 2**20)
        [(0, 0, 32), (0, 48, 64)]

    Args:
        extents: The variables, in the order of the model's.
        ranks: The number of ranks.
        limit: The size limit of a bucket in bytes.

    Returns:
        The bounds of each variable.
    """
    order = list(reversed(range(len(extents))))
    sizes: dict[int, int | None] = {index: extents[index].count * extents[index].itemsize for index in order}
    bounds: list[Bounds] = [()] * len(extents)
    for bucket in pack(order, {index: extents[index].dtype for index in order}, sizes, limit):
        total, start = sum(extents[index].count for index in bucket), 0
        for index in bucket:
            cuts = [_cut(extents[index], total * rank / ranks - start, total / ranks) for rank in range(1, ranks)]
            bounds[index] = (0, *cuts, extents[index].count)
            start += extents[index].count
    return bounds


def _cut(extent: Extent, wanted: float, share: float) -> int:
    """Rounds where a variable is cut: to its rows if that is exact enough, so that sparse gradients can be cut too."""
    at = min(max(wanted, 0.0), extent.count)
    if not extent.may_be_cut or min(at, extent.count - at) * SLIVER < share:
        return extent.count if at * 2 > extent.count else 0
    aligned = max(ALIGNED // extent.itemsize, 1)
    step = math.lcm(extent.row, aligned) if extent.row * ROUGH < share else aligned
    if step * ROUGH > share and extent.row * ROUGH < share:
        step = extent.row
    return min(round(at / step) * step, extent.count)


def by_variables(extents: Sequence[Extent], ranks: int) -> list[Bounds]:
    """Assigns whole variables, so that ranks have about as many bytes.

    Args:
        extents: The variables.
        ranks: The number of ranks.

    Returns:
        The bounds of each variable: one rank has all of it.
    """
    loads = [0] * ranks
    bounds: list[Bounds] = [()] * len(extents)
    sizes = [extent.count * extent.itemsize for extent in extents]
    for index in sorted(range(len(extents)), key=lambda index: (-sizes[index], index)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        count = extents[index].count
        loads[owner] += sizes[index]
        bounds[index] = tuple(count if rank > owner else 0 for rank in range(ranks + 1))
    return bounds


class Shards:
    """The variables that an optimizer updates, and for each what this rank updates of it.

    The part of a variable that this rank has all of is the variable itself. Of one that lies across a cut, the part is
    a variable of its own, whose value shares the memory of the whole one but for the time between the update and the
    gathering that follows it. The parts of other ranks' variables are empty.

    Args:
        variables: The model's variables.
        bounds: The bounds of each; None for one that each rank keeps and updates for itself.
        ranks: The ranks that share the update.
        index: This rank's index among them.
    """

    def __init__(self, variables: Sequence[Any], bounds: Sequence[Bounds | None], ranks: Sequence[int],
                 index: int) -> None:
        self.variables: list[Any] = list(variables)
        self.bounds: list[Bounds | None] = list(bounds)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self._me = index
        self._indices = {compat.variable_key(variable): number for number, variable in enumerate(variables)}
        self.parts: list[Any] = [self._part(number) for number in range(len(self.variables))]
        self._of_parts = {compat.variable_key(part): number for number, part in enumerate(self.parts)}
        # What a rank gives the optimizer that has no part of any gradient of a step.
        self.placeholder: Any = compat.variable_like(self.variables[0], (1,), "hvkeras_placeholder")

    def is_for(self, ranks: int, rank: int) -> bool:
        """Whether they are assigned to all ranks of a job of this size, in which this process has this rank."""
        return self.ranks == tuple(range(ranks)) and self._me == rank

    def numbers_of(self, variables: Sequence[Any]) -> list[int] | None:
        """The numbers of variables of the model; None if there are others among them."""
        found = [self._indices.get(compat.variable_key(variable)) for variable in variables]
        return None if None in found else [number for number in found if number is not None]

    def variable_of(self, part: Any) -> Any:
        """The variable of the model that a part belongs to; anything else is returned as it is."""
        number = self._of_parts.get(compat.variable_key(part))
        return part if number is None else self.variables[number]

    def number_of(self, part: Any) -> int | None:
        """The number of the variable that a part belongs to."""
        return self._of_parts.get(compat.variable_key(part))

    def shared_numbers(self) -> list[int]:
        """The numbers of the variables of which each rank has a part, instead of keeping its own."""
        return [number for number, bounds in enumerate(self.bounds) if bounds is not None]

    def range_of(self, number: int) -> tuple[int, int]:
        """The elements of a variable that this rank updates: the first one, and the one after the last."""
        bounds = self.bounds[number]
        return (0, _count(self.variables[number])) if bounds is None else (bounds[self._me], bounds[self._me + 1])

    def is_mine(self, number: int) -> bool:
        """Whether this rank updates at least an element of a variable."""
        start, stop = self.range_of(number)
        return start < stop or self.bounds[number] is None

    def is_all_mine(self, number: int) -> bool:
        """Whether it updates all of it."""
        return self.parts[number] is self.variables[number]

    def rows_of(self, number: int) -> tuple[int, int] | None:
        """The rows that this rank updates; None if the variable is cut within rows."""
        row = _row(self.variables[number])
        start, stop = self.range_of(number)
        is_by_rows = row and all(cut % row == 0 for cut in self.bounds[number] or ())
        return (start // row, stop // row) if is_by_rows else None

    def part_shape(self, number: int) -> tuple[int, ...]:
        """The shape of this rank's part."""
        shape, (start, stop) = tuple(self.variables[number].shape), self.range_of(number)
        if stop - start == _count(self.variables[number]):
            return shape
        rows = self.rows_of(number)
        return (stop - start,) if rows is None or not shape else (rows[1] - rows[0], *shape[1:])

    def cut(self, number: int, tensor: Any) -> Any:
        """This rank's part of a tensor of a variable's shape, or of `tf.IndexedSlices`; it shares the memory."""
        if self.is_all_mine(number):
            return tensor
        rows = self.rows_of(number)
        if isinstance(tensor, tf.IndexedSlices):
            if rows is not None:
                inside = (tensor.indices >= rows[0]) & (tensor.indices < rows[1])
                return tf.IndexedSlices(
                    tf.boolean_mask(tensor.values, inside),
                    tf.boolean_mask(tensor.indices, inside) - rows[0],
                    tf.constant(self.part_shape(number), tf.as_dtype(tensor.indices.dtype)))
            tensor = tf.convert_to_tensor(tensor)
        return self._within(number, tensor)

    def follow(self, numbers: Sequence[int]) -> None:
        """Gives the parts of variables that lie across cuts the values that these have now."""
        for number in numbers:
            if self.is_mine(number) and not self.is_all_mine(number):
                whole = compat.as_tf_variable(self.variables[number])
                compat.as_tf_variable(self.parts[number]).assign(self.cut(number, whole.read_value()), read_value=False)

    def _part(self, number: int) -> Any:
        variable, (start, stop) = self.variables[number], self.range_of(number)
        if self.bounds[number] is None or stop - start == _count(variable):
            return variable
        shape = (0, *tuple(variable.shape)[1:]) if start == stop else self.part_shape(number)
        part = compat.variable_like(variable, shape)
        if start < stop:
            with graphs.eagerly():
                compat.as_tf_variable(part).assign(self._within(number, compat.as_tf_variable(variable).read_value()))
        return part

    def _within(self, number: int, whole: Any) -> Any:
        """This rank's part of a dense tensor, of which it has neither all nor nothing."""
        rows = self.rows_of(number)
        start, stop = self.range_of(number) if rows is None else rows
        return (tf.reshape(whole, [-1]) if rows is None else whole)[start:stop]


def extent_of(variable: Any, may_be_cut: bool) -> Extent:
    """What of a variable matters for assigning its parts.

    Args:
        variable: A variable of the model.
        may_be_cut: Whether the optimizer treats each of its elements by itself.
    """
    dtype = tf.as_dtype(variable.dtype)
    is_constrained = getattr(variable, "constraint", None) is not None
    return Extent(tuple(int(size) for size in variable.shape), dtype.name, int(dtype.size),
                  may_be_cut and not is_constrained)


def _count(variable: Any) -> int:
    return int(compat.as_tf_variable(variable).shape.num_elements())


def _row(variable: Any) -> int:
    shape = tuple(variable.shape)
    return _count(variable) // int(shape[0]) if shape and shape[0] else 0
