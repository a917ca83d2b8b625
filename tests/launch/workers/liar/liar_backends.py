"""Faulty backends that `hvkeras bench` must detect: wrong results, no start, crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.backends.interface import Reduction, Start
from hvkeras.backends.tfdist import TfdistBackend


class _Last(TfdistBackend):
    """TensorFlow's collectives, with a flag on the last rank."""

    def start(self, start: Start) -> int:
        self._last = start.topology.rank == start.topology.size - 1
        return super().start(start)

    def allreduce(
        self, tensors: Sequence[Any], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Any]:
        return self.misbehave(tensors, super().allreduce(tensors, key, reduction, ranks, before, after))


class Liar(_Last):
    """Element 7 is wrong in about the last bit on the last rank."""

    name = "liar"
    least = 8  # size from which tensors are wrong

    def misbehave(self, _: Sequence[Any], results: list[Any]) -> list[Any]:
        return [tf.tensor_scatter_nd_update(each, [[7]], [each[7] * 1.0001])
                if self._last and each.shape.rank == 1 and (each.shape.num_elements() or 0) >= self.least else each
                for each in results]


class LiarAboutMuch(Liar):
    """The same, only for large tensors."""

    name = "liar_about_much"
    least = 1000


class Broken(TfdistBackend):
    """Fails to start on rank 1."""

    name = "broken"

    def start(self, start: Start) -> int:
        if start.topology.rank == 1:
            raise OSError("the cable is unplugged")
        return super().start(start)


class Mortal(_Last):
    """Crashes on the last rank at the first large tensor."""

    name = "mortal"

    def misbehave(self, tensors: Sequence[Any], results: list[Any]) -> list[Any]:
        if self._last and tensors[0].shape.num_elements() > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return results
