"""A ring buffer of numbers: graphs append rows, and the latest rows are kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.library import loading

Array = np.ndarray[Any, Any]

_numbers = itertools.count()


def ring(name: str, columns: int, capacity: int) -> Ring | NativeRing:
    """Makes a ring buffer that functions append to without running Python, and that any thread may read meanwhile.

    Args:
        name: Its name.
        columns: How many numbers a row has.
        capacity: How many of the latest rows are kept.
    """
    kind = Ring if loading.objection() else NativeRing
    return kind(name, columns, capacity)


class NativeRing:
    """A ring buffer in the C++ library, usable with any engine: one operation per row."""

    def __init__(self, name: str, columns: int, capacity: int) -> None:
        self._key, self._columns, self._capacity = f"{name} {next(_numbers)}", columns, capacity
        self._library = loading.library()
        self._library.keep(self._key, columns, capacity)

    def append(self, numbers: Sequence[Any], count: Any = 1) -> None:
        """Appends a row of float64 numbers, unless `count`, an int64, is 0."""
        with tf.device("CPU:0"):
            noted = self._library.operations.hvkeras_note(
                numbers=list(numbers), keep=tf.convert_to_tensor(count, tf.int64), key=self._key)
        graphs.run_independently(noted)

    def rows(self) -> tuple[Array, int]:
        """The latest rows, oldest first, and the index of the first of them among all rows ever appended."""
        return self._library.kept(self._key, self._columns, self._capacity)


class Ring:
    """A ring buffer in variables on the CPU, for where the C++ library is not available."""

    def __init__(self, name: str, columns: int, capacity: int) -> None:
        self._slots = capacity + 1  # the slot that is written next is never read
        self._count = graphs.lasting_variable(0, tf.int64, f"{name}_count")
        self._rows = graphs.lasting_variable(np.zeros((self._slots, columns)), tf.float64, f"{name}_rows")

    def append(self, numbers: Sequence[Any], count: Any = 1) -> None:
        """Appends a row of float64 numbers; if `count`, an int64, is 0, the next row overwrites it."""
        with tf.device("CPU:0"):
            row = tf.stack(list(numbers))
            place = self._count.read_value() % self._slots
            written = self._rows.scatter_update(tf.IndexedSlices(row, place))
            with tf.control_dependencies([] if tf.executing_eagerly() else [written.op]):
                self._count.assign_add(count, read_value=False)

    def rows(self) -> tuple[Array, int]:
        """The latest rows, oldest first, and the index of the first of them among all rows ever appended."""
        count = int(self._count.numpy())
        rows: Array = self._rows.numpy()
        first = max(0, int(self._count.numpy()) - self._slots + 1)  # rows from here on were not overwritten meanwhile
        return rows[np.arange(first, count) % self._slots], first
