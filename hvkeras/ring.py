"""A table of numbers that graphs append to, of which the latest rows are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import graphs

Array = np.ndarray[Any, Any]


class Ring:
    """Rows in variables on the CPU, which functions write to without Python and any thread may read meanwhile.

    Args:
        name: What its variables are called.
        columns: The numbers of a row.
        capacity: How many rows are kept, the latest ones.
    """

    def __init__(self, name: str, columns: int, capacity: int) -> None:
        self._slots = capacity + 1  # the one that is written next is never read
        self._count = graphs.lasting_variable(0, tf.int64, f"{name}_count")
        self._rows = graphs.lasting_variable(np.zeros((self._slots, columns)), tf.float64, f"{name}_rows")

    def append(self, row: Any, count: Any = 1) -> None:
        """Adds a row; the next one takes its place where `count` is 0."""
        with tf.device("CPU:0"):
            place = self._count.read_value() % self._slots
            written = self._rows.scatter_update(tf.IndexedSlices(row, place))
            with tf.control_dependencies([] if tf.executing_eagerly() else [written.op]):
                self._count.assign_add(count, read_value=False)

    def rows(self) -> tuple[Array, int]:
        """The latest rows, the oldest one first, and the number of that one among all that there were."""
        count = int(self._count.numpy())
        rows: Array = self._rows.numpy()
        first = max(0, int(self._count.numpy()) - self._slots + 1)  # none of which was written to since
        return rows[np.arange(first, count) % self._slots], first
