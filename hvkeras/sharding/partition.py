"""Which rows, batches and parts each rank gets: arithmetic alone, no data and no communication."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Partition:
    """How data are dealt to ranks.

    In training all ranks get equally many rows, in every step: the optimizer averages gradients without
    seeing batch sizes, so a rank with fewer rows would give each of them more weight. In evaluation every row
    goes to exactly one rank, since sums of metric states do not mind how many each rank has.

    Attributes:
        rank: This rank's number among those that share the data.
        size: How many share them.
        training: Whether all ranks must get equally many rows; what is left over is dropped.
    """

    rank: int
    size: int
    training: bool

    def rows(self, count: int) -> range:
        """The rows of `count` that this rank gets when they are dealt one by one.

        With the batch size b on every rank, step t's batches of all ranks are the rows t b size to (t + 1) b size.
        """
        return range(self.rank, count - self.dropped(count), self.size)

    def part(self, count: Any) -> tuple[Any, Any]:
        """The first row and the one after the last when `count` rows (a number or a tensor) are cut in parts."""
        if self.training:
            share = count // self.size
            return self.rank * share, (self.rank + 1) * share
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def part_size(self, count: int) -> int:
        """How many rows `part` has."""
        start, stop = self.part(count)
        return int(stop - start)

    def dropped(self, count: int) -> int:
        """How many of `count` rows no rank gets."""
        return count % self.size if self.training else 0


@dataclass(frozen=True)
class Coverage:
    """What a rank got of the data.

    Attributes:
        mine: This rank's samples; None when nobody knows.
        total: All samples; None when nobody knows.
        dropped: Samples that no rank gets.
        note: What else the user has to know, in words.
    """

    mine: int | None
    total: int | None
    dropped: int
    note: str = ""

    def line(self, rank: int) -> str:
        """The line that is printed: `rank 1: 718 of 1,437, overlap 0, dropped 1`."""
        if self.mine is None or self.total is None:
            return f"rank {rank}: {self.note}"
        line = f"rank {rank}: {self.mine:,} of {self.total:,}, overlap 0, dropped {self.dropped:,}"
        return f"{line} ({self.note})" if self.note else line

    def doubtful(self) -> Coverage:
        """The same where the ranks could not compare what they have."""
        doubt = "contents are random at every reading, so the ranks could not compare them"
        return replace(self, note=f"{self.note}; {doubt}" if self.note else doubt)


@dataclass(frozen=True)
class Batches:
    """The rows of a series of batches, all but the last of which have equally many.

    Attributes:
        rows: Rows of a full batch.
        full: How many batches are full.
        last: Rows of the shorter last batch; 0 if there is none.
    """

    rows: int
    full: int
    last: int

    @property
    def total(self) -> int:
        """The rows of all batches."""
        return self.rows * self.full + self.last

    def cut(self, deal: Partition) -> tuple[Coverage, int]:
        """What a rank gets when each batch is cut in parts: its coverage, and how many parts are not empty."""
        mine = self.full * deal.part_size(self.rows) + deal.part_size(self.last)
        dropped = self.full * deal.dropped(self.rows) + deal.dropped(self.last)
        parts = self.full * bool(deal.part_size(self.rows)) + bool(deal.part_size(self.last))
        return Coverage(mine, self.total, dropped), parts

    def rounds(self, deal: Partition) -> tuple[range, list[tuple[int, int, int]]]:
        """What a rank gets when whole full batches are dealt in rounds, and the rest is cut in parts.

        Returns:
            The numbers of the rank's whole batches, one a round; and its part of the rest as
            (batch, first row, row after the last).
        """
        dealt = self.full // deal.size * deal.size
        start, stop = deal.part(self.total - dealt * self.rows)
        pieces = []
        for batch in range(dealt, self.full + bool(self.last)):
            before = (batch - dealt) * self.rows
            first, after = max(start - before, 0), min(stop - before, self.rows)
            if first < after:
                pieces.append((batch, first, after))
        return range(deal.rank, dealt, deal.size), pieces
