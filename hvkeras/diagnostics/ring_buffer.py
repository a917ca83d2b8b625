"""Ring buffers of numbers: graphs or Python append rows, the latest are held, and any thread reads them meanwhile."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from hvkeras.backends import cpp_library
from hvkeras.compat import graphs
from hvkeras.diagnostics.record import Array
from hvkeras.host.forks import ForkSafeLock

_numbers = itertools.count()


class Rows(NamedTuple):
    """Consecutive rows.

    Attributes:
        table: float64, [rows, columns], the oldest row first.
        first: The index of the first of them among all rows ever appended.
    """

    table: Array
    first: int

    @property
    def after(self) -> int:
        """The index of the row that will follow."""
        return self.first + len(self.table)

    def since(self, index: int) -> Rows:
        """Those from an index on."""
        return Rows(self.table[max(0, index - self.first):], min(max(self.first, index), self.after))


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows that were read one after another, as one table.

    Args:
        parts: At least one.
    """
    table = np.concatenate([rows.table for rows in parts])
    return Rows(table, parts[-1].after - len(table))


def ring(name: str, columns: int, capacity: int) -> Ring | NativeRing:
    """Make a ring buffer that functions append to without running Python, and that any thread may read meanwhile.

    Args:
        name: Its name.
        columns: How many numbers a row has.
        capacity: How many of the latest rows it holds.
    """
    kind = Ring if cpp_library.objection() else NativeRing
    return kind(name, columns, capacity)


class NativeRing:
    """A ring buffer in the C++ library, usable with any engine: one operation per row."""

    def __init__(self, name: str, columns: int, capacity: int) -> None:
        self._key, self._columns, self._capacity = f"{name} {next(_numbers)}", columns, capacity
        self._library = cpp_library.library()
        self._library.keep(self._key, columns, capacity)

    def append(self, numbers: Sequence[Any], count: Any = 1) -> None:
        """Append a row of float64 numbers, unless `count`, an int64, is 0."""
        with tf.device("CPU:0"):
            noted = self._library.operations.hvkeras_record(
                numbers=list(numbers), keep=tf.convert_to_tensor(count, tf.int64), key=self._key)
        graphs.run_independently(noted)

    def rows(self, since: int = 0) -> Rows:
        """Return the latest rows, from an index on."""
        return Rows(*self._library.kept(self._key, self._columns, self._capacity)).since(since)


class Ring:
    """A ring buffer in variables on the CPU, for where the C++ library is not available."""

    def __init__(self, name: str, columns: int, capacity: int) -> None:
        self._slots = capacity + 1  # the slot that is written next is never read
        self._count = graphs.persistent_variable(0, tf.int64, f"{name}_count")
        self._rows = graphs.persistent_variable(np.zeros((self._slots, columns)), tf.float64, f"{name}_rows")

    def append(self, numbers: Sequence[Any], count: Any = 1) -> None:
        """Append a row of float64 numbers; if `count`, an int64, is 0, the next row overwrites it."""
        with tf.device("CPU:0"):
            row = tf.stack(list(numbers))
            index = self._count.read_value() % self._slots
            written = self._rows.scatter_update(tf.IndexedSlices(row, index))
            with tf.control_dependencies([] if tf.executing_eagerly() else [written.op]):
                self._count.assign_add(count, read_value=False)

    def rows(self, since: int = 0) -> Rows:
        """Return the latest rows, from an index on."""
        count = int(self._count.numpy())
        rows: Array = self._rows.numpy()
        first = max(0, int(self._count.numpy()) - self._slots + 1)  # rows from here on were not overwritten meanwhile
        first = min(max(since, first), count)
        return Rows(rows[np.arange(first, count) % self._slots], first)


class PythonRing:
    """A ring buffer that Python appends to, in any thread."""

    def __init__(self, columns: int, capacity: int) -> None:
        self._columns, self._count, self._lock = columns, 0, ForkSafeLock()
        self._rows: collections.deque[tuple[float, ...]] = collections.deque(maxlen=capacity)

    def append(self, *numbers: float) -> None:
        """Append a row."""
        with self._lock:
            self._rows.append(numbers)
            self._count += 1

    def rows(self, since: int = 0) -> Rows:
        """Return the latest rows, from an index on."""
        with self._lock:
            rows, count = self._rows.copy(), self._count
        first = min(max(since, count - len(rows)), count)
        new = list(itertools.islice(rows, first - count + len(rows), None))
        return Rows(np.array(new, np.float64).reshape(-1, self._columns), first)


class Track(Protocol):
    """Whatever holds spans."""

    def rows(self, since: int = 0) -> Rows:
        """Return the latest spans, from an index on."""


class RingReader:
    """Reads what is new in tracks.

    Args:
        tracks: Returns the tracks by name.
        begin: The index of the first row to read, by track; by default, the first one that is yet to come.

    Attributes:
        lost: How many rows were overwritten before they were read.
    """

    def __init__(self, tracks: Callable[[], Mapping[str, Track]], begin: Mapping[str, int] | None = None) -> None:
        self._tracks = tracks
        self._next = dict(counts(tracks()) if begin is None else begin)
        self.lost = 0

    def new(self) -> dict[str, Rows]:
        """Return the rows that were appended since the last call, by track."""
        found = {}
        for name, track in self._tracks().items():
            seen = self._next.get(name, 0)
            found[name] = track.rows(seen)
            self.lost += found[name].first - seen
            self._next[name] = found[name].after
        return found


def counts(tracks: Mapping[str, Track]) -> dict[str, int]:
    """Return the number of rows have been appended to each track."""
    return {name: track.rows().after for name, track in tracks.items()}
