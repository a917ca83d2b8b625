"""Snapshots of variables, without a copy where TensorFlow's copy-on-write suffices."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat


class Snapshot:
    """Values of variables that later assignments do not change.

    For variables in host memory, a snapshot only holds references: before TensorFlow updates a variable in place, it
    copies a value that is referenced elsewhere. Values on other devices are copied to host memory by a thread, while
    the next step runs.

    Args:
        values: Tensors that share the variables' memory, or arrays.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)
        self._copying: threading.Thread | None = None
        if any(_is_on_device(value) for value in self._values):
            self._copying = threading.Thread(target=self._copy, name="hvkeras-snapshot")
            self._copying.start()

    def values(self) -> list[Any]:
        """Return the values, as tensors in host memory or arrays."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        return self._values

    def arrays(self) -> list[Any]:
        """Return the values as arrays, which share the tensors' memory if NumPy supports their dtype."""
        return [value if isinstance(value, np.ndarray) else compat.as_array(value) for value in self.values()]

    def _copy(self) -> None:
        for index, value in enumerate(self._values):
            if _is_on_device(value):
                self._values[index] = value.numpy()


class SnapshotReader:
    """Reader that takes snapshots of all its variables in one call of a `tf.function`."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._read = tf.function(lambda: [compat.as_tf_variable(variable).read_value() for variable in self._variables],
                                 autograph=False)

    def reads(self, variables: Sequence[Any]) -> bool:
        """Return whether this reader was made for exactly these variables."""
        return len(variables) == len(self._variables) and all(map(operator.is_, variables, self._variables))

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current values."""
        return Snapshot(self._read())


def _is_on_device(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and "CPU:" not in value.device
