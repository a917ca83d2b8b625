"""Which rank updates which part of each variable, where the ranks share an optimizer's update.

Optimizers that treat each element by itself get parts of the buckets in which gradients are reduced: each bucket is cut
into as many pieces of equal size as there are ranks, so that each rank reduces, updates and sends as much of it as the
others. Few variables lie across a cut. Optimizers that look at a whole variable get whole variables, the largest first,
each on the rank that has the least by then (docs/decisions/sharded-update.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvkeras.gradients.packing import pack

Bounds = tuple[int, ...]  # the rank at place r of a process set has elements [bounds[r], bounds[r + 1])

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
    """Deals variables so that each rank has an equal part of each bucket.

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
    sizes: dict[int, int | None] = {place: extents[place].count * extents[place].itemsize for place in order}
    bounds: list[Bounds] = [()] * len(extents)
    for bucket in pack(order, {place: extents[place].dtype for place in order}, sizes, limit):
        total, start = sum(extents[place].count for place in bucket), 0
        for place in bucket:
            cuts = [_cut(extents[place], total * rank / ranks - start, total / ranks) for rank in range(1, ranks)]
            bounds[place] = (0, *cuts, extents[place].count)
            start += extents[place].count
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
    """Deals whole variables, so that ranks have about as many bytes.

    Args:
        extents: The variables.
        ranks: The number of ranks.

    Returns:
        The bounds of each variable: one rank has all of it.
    """
    loads = [0] * ranks
    bounds: list[Bounds] = [()] * len(extents)
    sizes = [extent.count * extent.itemsize for extent in extents]
    for place in sorted(range(len(extents)), key=lambda place: (-sizes[place], place)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        count = extents[place].count
        loads[owner] += sizes[place]
        bounds[place] = tuple(count if rank > owner else 0 for rank in range(ranks + 1))
    return bounds
