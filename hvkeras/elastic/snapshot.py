"""Values of variables at one moment, taken without a copy where TensorFlow makes one anyway."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat


class Snapshot:
    """The values that variables have now; later assignments do not change them.

    A snapshot of variables in host memory only holds references: TensorFlow copies the value of a variable that is
    referenced elsewhere before it changes it in place, so that the one copy is made by the next update. Values on other
    devices are copied to host memory by a thread, while the next step runs.

    Args:
        values: Tensors that share the variables' memory, or arrays.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)
        self._copying: threading.Thread | None = None
        if any(_is_elsewhere(value) for value in self._values):
            self._copying = threading.Thread(target=self._copy, name="hvkeras-snapshot")
            self._copying.start()

    def values(self) -> list[Any]:
        """Returns the values: tensors in host memory, or arrays."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        return self._values

    def arrays(self) -> list[Any]:
        """Returns the values as arrays, which share the memory of tensors where NumPy knows their dtype."""
        return [value if isinstance(value, np.ndarray) else compat.as_array(value) for value in self.values()]

    def _copy(self) -> None:
        for index, value in enumerate(self._values):
            if _is_elsewhere(value):
                self._values[index] = value.numpy()


class SnapshotReader:
    """Takes snapshots of variables, all of which it reads in one call of TensorFlow.

    Args:
        variables: The variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._read = tf.function(lambda: [compat.as_tf_variable(variable).read_value() for variable in self._variables],
                                 autograph=False)

    def reads(self, variables: Sequence[Any]) -> bool:
        """Whether these are its variables."""
        return len(variables) == len(self._variables) and all(map(operator.is_, variables, self._variables))

    def snapshot(self) -> Snapshot:
        """Returns the values that the variables have now."""
        return Snapshot(self._read())


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and "CPU:" not in value.device
