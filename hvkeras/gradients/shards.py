"""Parts of variables that each rank updates in a sharded update.

For optimizers that update each element independently, the buckets in which gradients are reduced are cut into parts of
equal size, one for each rank. Each rank then reduces, updates and sends the same amount of each bucket, and few
variables lie across a cut. Other optimizers get complete variables, which are assigned to ranks in order of size, each
to the rank with the lowest load so far (docs/decisions/sharded-update.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.buckets import FIRST_BUCKET, pack
from hvkeras.compat import graphs

Bounds = tuple[int, ...]  # the i-th rank of a process set has the elements [bounds[i], bounds[i + 1])

ALIGNED = 64  # bytes to which cuts are rounded, so that TensorFlow can slice without a copy
ROUGH = 50  # cuts are rounded to rows if a row is less than 1 / ROUGH of a rank's part of the bucket
SLIVER = 200  # and to an end of the variable if that is closer than 1 / SLIVER of this part


@dataclass(frozen=True)
class Extent:
    """Shape and dtype of a variable, and whether several ranks may have parts of it (`may_be_cut`)."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    may_be_cut: bool = True

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.shape[1:])


def by_elements(extents: Sequence[Extent], ranks: int, limit: int) -> list[Bounds]:
    """Assign parts of variables, so that each rank has an equal part of each bucket.

    Example:
        >>> by_elements([Extent((8, 4), "float32", 4), Extent((64,), "float32", 4)], 2, 2**20)
        [(0, 0, 32), (0, 48, 64)]

    Args:
        extents: The variables, in the model's order.
        limit: The size limit of a bucket in bytes.

    Returns:
        The bounds of each variable.
    """
    order = list(reversed(range(len(extents))))
    sizes: dict[int, int | None] = {index: extents[index].count * extents[index].itemsize for index in order}
    bounds: list[Bounds] = [()] * len(extents)
    for bucket in pack(order, {index: extents[index].dtype for index in order}, sizes, limit, FIRST_BUCKET):
        total, start = sum(extents[index].count for index in bucket), 0
        for index in bucket:
            cuts = [_cut(extents[index], total * rank / ranks - start, total / ranks) for rank in range(1, ranks)]
            bounds[index] = (0, *cuts, extents[index].count)
            start += extents[index].count
    return bounds


def _cut(extent: Extent, exact: float, share: float) -> int:
    """Round the index of a cut: to rows if that is precise enough, so that sparse gradients can be cut, too."""
    at = min(max(exact, 0.0), extent.count)
    if not extent.may_be_cut or min(at, extent.count - at) * SLIVER < share:
        return extent.count if at * 2 > extent.count else 0
    aligned = max(ALIGNED // extent.itemsize, 1)
    step = math.lcm(extent.row, aligned) if extent.row * ROUGH < share else aligned
    if step * ROUGH > share and extent.row * ROUGH < share:
        step = extent.row
    return min(round(at / step) * step, extent.count)


def by_variables(extents: Sequence[Extent], ranks: int) -> list[Bounds]:
    """Assign complete variables, so that the ranks have similar numbers of bytes.

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
    """The variables that an optimizer updates, and this rank's part of each.

    If this rank has an entire variable, the part is the variable itself. If the variable lies across a cut, the part is
    a separate variable, whose value shares the memory of the complete one, except between the update and the following
    gather. The parts of other ranks' variables are empty.

    Args:
        bounds: The bounds of each variable; None for a local variable.
        ranks: The global ranks of the sharded update.
        index: This rank's index in `ranks`.
    """

    def __init__(self, variables: Sequence[Any], bounds: Sequence[Bounds | None], ranks: Sequence[int],
                 index: int) -> None:
        self.variables: list[Any] = list(variables)
        self.bounds: list[Bounds | None] = list(bounds)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self._index = index
        self._indices = {compat.variable_key(variable): number for number, variable in enumerate(variables)}
        self.parts: list[Any] = [self._part(number) for number in range(len(self.variables))]
        self._of_parts = {compat.variable_key(part): number for number, part in enumerate(self.parts)}
        # For the optimizer's update on a rank that has no part of any gradient of a step.
        self.placeholder: Any = compat.variable_like(self.variables[0], (1,), "hvkeras_placeholder")

    def is_for(self, ranks: int, rank: int) -> bool:
        """Return whether the variables are assigned to all ranks of a job of this size, with this rank as `rank`."""
        return self.ranks == tuple(range(ranks)) and self._index == rank

    def numbers_of(self, variables: Sequence[Any]) -> list[int] | None:
        """Return the numbers of variables of the model; None if any other variable is among them."""
        found = [self._indices.get(compat.variable_key(variable)) for variable in variables]
        return None if None in found else [number for number in found if number is not None]

    def variable_of(self, part: Any) -> Any:
        """Return the variable of the model that a part belongs to; the argument itself if it is not a part."""
        number = self._of_parts.get(compat.variable_key(part))
        return part if number is None else self.variables[number]

    def number_of(self, part: Any) -> int | None:
        """Return the number of the variable that a part belongs to."""
        return self._of_parts.get(compat.variable_key(part))

    def shared_numbers(self) -> list[int]:
        """Return the numbers of the sharded variables."""
        return [number for number, bounds in enumerate(self.bounds) if bounds is not None]

    def range_of(self, number: int) -> tuple[int, int]:
        """Return the range of flattened elements that this rank updates, as start and stop."""
        bounds = self.bounds[number]
        return (0, _count(self.variables[number])) if bounds is None else (bounds[self._index], bounds[self._index + 1])

    def has_part(self, number: int) -> bool:
        """Return whether this rank updates at least one element of a variable."""
        start, stop = self.range_of(number)
        return start < stop or self.bounds[number] is None

    def has_all(self, number: int) -> bool:
        """Return whether this rank updates all elements of a variable."""
        return self.parts[number] is self.variables[number]

    def rows_of(self, number: int) -> tuple[int, int] | None:
        """Return the range of rows that this rank updates; None if the variable is cut within rows."""
        row = _row(self.variables[number])
        start, stop = self.range_of(number)
        is_by_rows = row and all(cut % row == 0 for cut in self.bounds[number] or ())
        return (start // row, stop // row) if is_by_rows else None

    def part_shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        shape, (start, stop) = tuple(self.variables[number].shape), self.range_of(number)
        if stop - start == _count(self.variables[number]):
            return shape
        rows = self.rows_of(number)
        return (stop - start,) if rows is None or not shape else (rows[1] - rows[0], *shape[1:])

    def cut(self, number: int, tensor: Any) -> Any:
        """Return this rank's part of a tensor of the variable's shape, or of `tf.IndexedSlices`, without a copy."""
        if self.has_all(number):
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

    def refresh_parts(self, numbers: Sequence[int]) -> None:
        """Update the parts of variables that lie across cuts with the current values of the variables."""
        for number in numbers:
            if self.has_part(number) and not self.has_all(number):
                value = compat.as_tf_variable(self.variables[number]).read_value()
                compat.as_tf_variable(self.parts[number]).assign(self.cut(number, value), read_value=False)

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

    def _within(self, number: int, tensor: Any) -> Any:
        rows = self.rows_of(number)
        start, stop = self.range_of(number) if rows is None else rows
        return (tf.reshape(tensor, [-1]) if rows is None else tensor)[start:stop]


def extent_of(variable: Any, may_be_cut: bool) -> Extent:
    """Return the extent of a variable. Variables with a constraint are never cut.

    Args:
        may_be_cut: Whether the optimizer updates each element independently.
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
