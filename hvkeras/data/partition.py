"""Partition of rows and batches between ranks, and shards of arrays by rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvkeras.data.consistency import DataFacts, Hints, fingerprint, require_same_data
from hvkeras.data.structure import count_rows, leaves, map_leaves, require_arrays, take_rows, take_slice
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet


@dataclass(frozen=True)
class Partition:
    """Partition of data between ranks.

    In training, all ranks get the same number of rows in every step: the optimizer averages gradients regardless of
    batch sizes, so each row on a rank with fewer rows would have more weight. In evaluation, every row goes to exactly
    one rank, since sums of metric states do not depend on the number of rows per rank.

    Attributes:
        rank: This rank's index among the ranks that share the data.
        size: The number of ranks that share the data.
        training: Whether all ranks must get the same number of rows; the remainder is dropped.
    """

    rank: int
    size: int
    training: bool

    def rows(self, count: int) -> range:
        """Return the rows of this rank, of `count` rows that are assigned one by one.

        With batch size b on every rank, step t covers the rows t b size to (t + 1) b size.
        """
        return range(self.rank, count - self.dropped(count), self.size)

    def part(self, count: Any) -> tuple[Any, Any]:
        """Return this rank's first row, and the row after its last, of `count` rows (int or tensor) in blocks."""
        if self.training:
            share = count // self.size
            return self.rank * share, (self.rank + 1) * share
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def part_size(self, count: int) -> int:
        """Return the number of rows in `part`."""
        start, stop = self.part(count)
        return int(stop - start)

    def dropped(self, count: int) -> int:
        """Return the number of rows, of `count`, that no rank gets."""
        return count % self.size if self.training else 0

    def require_one_each(self, count: int, what: str = "sample") -> None:
        """Check that every rank gets at least one sample for training.

        Args:
            count: The number of samples, or of elements.
            what: The unit of `count`, in the singular.

        Raises:
            UsageError: There are fewer than ranks, for training.
        """
        if self.training and count < self.size:
            raise UsageError(explain(f"Training needs at least one {what} per rank", "start fewer ranks, or train"
                                     " without hvd.shard", **{f"{what}s": count, "ranks": self.size}))


@dataclass(frozen=True)
class Coverage:
    """Part of the data that a rank gets.

    Attributes:
        mine: The number of this rank's samples; None if unknown.
        total: The number of all samples; None if unknown.
        dropped: The number of samples that no rank gets.
        note: Further information for the user.
        what: The unit of the counts, in the singular.
    """

    mine: int | None
    total: int | None
    dropped: int
    note: str = ""
    what: str = "sample"

    def line(self, size: int) -> str:
        """Return the line that one rank prints for all: `shard: 2 ranks x 718 of 1,437 samples, 1 dropped`.

        Args:
            size: The number of ranks that share the data.
        """
        if self.mine is None or self.total is None:
            return f"shard: each of {size} ranks gets {self.note}"
        if size * self.mine + self.dropped == self.total:
            line = f"shard: {size} ranks x {self.mine:,} of {self.total:,} {self.what}s"
        else:  # ranks get different numbers, and this one does not know the others'
            line = f"shard: {size} ranks share {self.total:,} {self.what}s, {self.mine:,} of them on this rank"
        line += f", {self.dropped:,} dropped" if self.dropped else ""
        return f"{line} ({self.note})" if self.note else line

    def unverified(self) -> Coverage:
        """Return the same coverage with a note that the ranks could not compare their data."""
        doubt = "contents are random each time they are read, so the ranks could not compare them"
        return replace(self, note=f"{self.note}; {doubt}" if self.note else doubt)


@dataclass(frozen=True)
class Batches:
    """Row counts of batches that all have the same number of rows, except the last.

    Attributes:
        rows: The number of rows in a full batch.
        last: The number of rows in the shorter last batch; 0 if there is none.
    """

    rows: int
    full: int
    last: int

    @property
    def total(self) -> int:
        """Number of rows in all batches."""
        return self.rows * self.full + self.last

    def cut(self, partition: Partition) -> tuple[Coverage, int]:
        """Return the coverage and the number of non-empty parts of a rank when each batch is split."""
        mine = self.full * partition.part_size(self.rows) + partition.part_size(self.last)
        dropped = self.full * partition.dropped(self.rows) + partition.dropped(self.last)
        parts = self.full * bool(partition.part_size(self.rows)) + bool(partition.part_size(self.last))
        return Coverage(mine, self.total, dropped), parts

    def rounds(self, partition: Partition) -> tuple[range, list[tuple[int, int, int]]]:
        """Return a rank's share when full batches are assigned in rounds and the remaining ones are split."""
        batches_in_rounds = self.full // partition.size * partition.size
        start, stop = partition.part(self.total - batches_in_rounds * self.rows)
        pieces = []
        for batch in range(batches_in_rounds, self.full + bool(self.last)):
            before = (batch - batches_in_rounds) * self.rows
            first, after = max(start - before, 0), min(stop - before, self.rows)
            if first < after:
                pieces.append((batch, first, after))
        return range(partition.rank, batches_in_rounds, partition.size), pieces


HINTS = Hints(
    call="call hvd.shard with the same arguments on every rank",
    amount="pass the whole data to hvd.shard on every rank, and do not split them before",
    order="",
    contents="pass the whole data to hvd.shard on every rank, not a part of them; make them with the same seed on every"
    " rank, as in numpy.random.default_rng(seed=0); and shuffle them afterwards, with shuffle=True",
)


def shard_arrays(data: Any, partition: Partition, shuffle: Any, seed: int,
                 process_set: ProcessSet) -> tuple[Any, Coverage]:
    """Return this rank's rows of a structure of arrays."""
    require_options(shuffle)
    require_arrays(data)
    if partition.size > 1:
        call = f"training={partition.training}, shuffle={shuffle}, seed={seed}"
        require_same_data("shard", lambda: arrays_facts(data, call), lambda: data, HINTS, process_set)
    return split_arrays(data, partition, shuffle, seed)


def split_arrays(data: Any, partition: Partition, shuffle: bool = False, seed: int = 0) -> tuple[Any, Coverage]:
    """Return this rank's rows of arrays that all ranks hold."""
    count = count_rows(data)
    partition.require_one_each(count)
    rows = partition.rows(count)
    coverage = Coverage(len(rows), count, partition.dropped(count))
    if shuffle:
        order = np.random.default_rng(seed).permutation(count)[rows.start : rows.stop : rows.step]
        return map_leaves(lambda leaf: take_rows(leaf, order), data), coverage
    if partition.size == 1:
        return data, coverage
    return map_leaves(lambda leaf: take_slice(leaf, rows), data), coverage


def require_options(shuffle: Any) -> None:
    """Check the options for arrays."""
    if shuffle not in (True, False) or not isinstance(shuffle, (bool, np.bool_)):
        raise UsageError(explain("Arrays must be shuffled as a whole or not at all", "pass shuffle=True, or leave it"
                                 " out, as model.fit shuffles each rank's rows anyway", shuffle=shuffle))


def arrays_facts(data: Any, call: str) -> DataFacts:
    """Return the facts about the arrays of a rank that all ranks compare."""
    return DataFacts(f"{len(leaves(data))} arrays, {call}", f"{count_rows(data):,} samples", "", fingerprint(data))
