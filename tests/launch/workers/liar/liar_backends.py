"""Backends that fail in the ways that `hvkeras bench` has to see: one computes wrongly, one does not start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.backends.interface import Reduction, Start
from hvkeras.backends.tfdist import TfdistBackend


class Liar(TfdistBackend):
    """TensorFlow's collectives, but element 7 is off by one bit or so on the last rank."""

    name = "liar"

    def start(self, start: Start) -> int:
        """Uses the cluster that tfdist has started, since a process has only one."""
        self._last = start.topology.rank == start.topology.size - 1
        self._cluster = _started[0]._cluster
        return start.topology.size

    def allreduce(self, tensors: Sequence[Any], key: str, reduction: Reduction, ranks: Sequence[int]) -> list[Any]:
        """Reduces as it should, and changes the result."""
        results = super().allreduce(tensors, f"liar {key}", reduction, ranks)
        return [tf.tensor_scatter_nd_update(each, [[7]], [each[7] * 1.0001]) if self._last and each.shape.rank == 1
                else each for each in results]


class Remembered(TfdistBackend):
    """tfdist under another name, which hands its cluster on."""

    name = "remembered"

    def start(self, start: Start) -> int:
        """Starts, and is found by `Liar`."""
        _started.append(self)
        return super().start(start)


class Broken(TfdistBackend):
    """Does not start on rank 1."""

    name = "broken"

    def start(self, start: Start) -> int:
        """Raises on one rank."""
        if start.topology.rank == 1:
            raise OSError("the cable is unplugged")
        return start.topology.size


_started: list[TfdistBackend] = []
