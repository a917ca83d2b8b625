"""Ring buffers of numbers: graphs or Python append rows, and any thread reads the latest ones concurrently."""

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
    """Consecutive rows of a ring buffer.

    Attributes:
        table: float64, [rows, columns], the oldest row first.
        first: Index of the first of these rows among all rows ever appended.
    """

    table: Array
    first: int

    @property
    def after(self) -> int:
        """Index of the row that follows the last one."""
        return self.first + len(self.table)

    def since(self, index: int) -> Rows:
        """Return the rows from an index on."""
        return Rows(self.table[max(0, index - self.first):], min(max(self.first, index), self.after))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Concatenate consecutive parts of a track.

    Args:
        parts: At least one part.
    """
    table = np.concatenate([rows.table for rows in parts])
    return Rows(table, parts[-1].after - len(table))


def ring(name: str, columns: int, capacity: int) -> Ring | NativeRing:
    """Create a ring buffer that functions append to without running Python, and that any thread may read concurrently.

    Args:
        name: Prefix of its key.
        capacity: Maximum number of rows that it holds.
    """
    kind = Ring if cpp_library.objection() else NativeRing
    return kind(name, columns, capacity)


class NativeRing:
    """Ring buffer in the C++ library, usable with any backend; appending is one operation."""

    def __init__(self, name: str, columns: int, capacity: int) -> None:
        self._key, self._columns, self._capacity = f"{name} {next(_numbers)}", columns, capacity
        self._library = cpp_library.library()
        self._library.start_recording(self._key, columns, capacity)

    def append(self, numbers: Sequence[Any], count: Any = 1) -> None:
        """Append a row of float64 numbers, unless `count`, an int64, is 0."""
        with tf.device("CPU:0"):
            operation = self._library.operations.hvkeras_record(
                numbers=list(numbers), keep=tf.convert_to_tensor(count, tf.int64), key=self._key)
        graphs.run_independently(operation)

    def rows(self, since: int = 0) -> Rows:
        """Return the available rows from an index on."""
        return Rows(*self._library.read_recording(self._key, self._columns, self._capacity)).since(since)


class Ring:
    """Ring buffer in variables on the CPU, used if the C++ library is not available."""

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
        """Return the available rows from an index on."""
        count = int(self._count.numpy())
        rows: Array = self._rows.numpy()
        # Rows from here on were not overwritten between reading `count` and now.
        first = max(0, int(self._count.numpy()) - self._slots + 1)
        first = min(max(since, first), count)
        return Rows(rows[np.arange(first, count) % self._slots], first)


class PythonRing:
    """Ring buffer that Python appends to, in any thread."""

    def __init__(self, columns: int, capacity: int) -> None:
        self._columns, self._count, self._lock = columns, 0, ForkSafeLock()
        self._rows: collections.deque[tuple[float, ...]] = collections.deque(maxlen=capacity)

    def append(self, *numbers: float) -> None:
        """Append a row."""
        with self._lock:
            self._rows.append(numbers)
            self._count += 1

    def rows(self, since: int = 0) -> Rows:
        """Return the available rows from an index on."""
        with self._lock:
            rows, count = self._rows.copy(), self._count
        first = min(max(since, count - len(rows)), count)
        new = list(itertools.islice(rows, first - count + len(rows), None))
        return Rows(np.array(new, np.float64).reshape(-1, self._columns), first)


class Track(Protocol):
    """Protocol of ring buffers, and of other sources of spans."""

    def rows(self, since: int = 0) -> Rows:
        """Return the available spans from an index on."""


class RingReader:
    """Reader of new rows in tracks.

    Args:
        tracks: Function that returns the tracks by name.
        begin: Index of the first row to read, by track; by default, only future rows are read.

    Attributes:
        lost: Number of rows that were overwritten before they were read.
    """

    def __init__(self, tracks: Callable[[], Mapping[str, Track]], begin: Mapping[str, int] | None = None) -> None:
        self._tracks = tracks
        self._next = dict(counts(tracks()) if begin is None else begin)
        self.lost = 0

    def new(self) -> dict[str, Rows]:
        """Return the rows appended since the last call, by track."""
        found = {}
        for name, track in self._tracks().items():
            seen = self._next.get(name, 0)
            found[name] = track.rows(seen)
            self.lost += found[name].first - seen
            self._next[name] = found[name].after
        return found


def counts(tracks: Mapping[str, Track]) -> dict[str, int]:
    """Return the number of rows ever appended to each track."""
    return {name: track.rows().after for name, track in tracks.items()}
