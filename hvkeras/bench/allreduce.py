"""Chains of dependent allreduces, like the collectives of consecutive training steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.backends.interface import Reduction
from hvkeras.bench import peers
from hvkeras.bench.participant import Participant
from hvkeras.bench.plan import TCP, Stage, rate_of, without_rate
from hvkeras.bench.ranks import WrongResultError
from hvkeras.bench.row import MPI_ALONE, PEER, REFERENCE, TCP_ALONE, BenchmarkRow, title_of
from hvkeras.bench.streams import Streams
from hvkeras.errors import explain
from hvkeras.settings import size_in_bytes

LONGEST = 100  # maximum number of links in a chain; fewer for large tensors
CHAIN_BYTES = 1024**3  # maximum bytes to reduce in a chain, but at least two links
CHAIN_SECONDS = 0.5  # maximum seconds on the network for a chain, but at least one link
_ITEM = 4  # bytes of a float32
_SMALLEST = 2.0**-20  # the unit of the ranks' values
_GROWTH = 110  # a sum is scaled down before it has grown by this power of two, to stay within float32

Reduce = Callable[[Any, str], Any]


def links_for(size: int, rate: float = math.inf) -> int:
    """Return the number of allreduces in a chain.

    Args:
        size: Bytes of the tensor.
        rate: Network bandwidth in bytes per second.
    """
    if math.isinf(rate):
        return max(2, min(LONGEST, CHAIN_BYTES // size))
    return max(1, min(LONGEST, int(CHAIN_SECONDS * rate / size)))


class AllreduceTask:
    """Input values of a chain and its expected results.

    Element j of rank r is 1 + (7 j + 3 r) mod 13 units, so the sums over n ranks are small integers. Each link but
    the first multiplies them by n, which is exact in float32 if n is a power of two. They are scaled down before they
    leave the range of float32.

    Args:
        label: The size as the user wrote it, and optionally a bandwidth.
        links: Number of allreduces; 0 to choose it by size and bandwidth.
    """

    def __init__(self, label: str, rank: int, ranks: int, links: int = 0) -> None:
        self.label, self.bytes = label, size_in_bytes(without_rate(label))
        self.links = links or links_for(self.bytes, rate_of(label))
        self.period = int(_GROWTH / math.log2(ranks))
        self.scale = float(ranks) ** -self.period
        self.own = self._values(rank)
        total = sum(self._values(each).astype(np.float64) for each in range(ranks))
        factor = float(ranks) ** (self.links - 1) * self.scale ** (self.links // self.period)
        self.expected = (total * factor).astype(np.float32)
        # The rounding error of one link is half a unit in the last place; the errors accumulate.
        exact = ranks & (ranks - 1) == 0
        self._tolerance = 0.0 if exact else self.links * float(np.finfo(np.float32).eps)

    def _values(self, rank: int) -> Any:
        elements = np.arange(self.bytes // _ITEM, dtype=np.int64)
        return ((1 + (7 * elements + 3 * rank) % 13) * _SMALLEST).astype(np.float32)

    def chained(self, reduce: Reduce, tensor: Any) -> Any:
        """Reduce a tensor `links` times, with a unique name for each link."""
        for link in range(1, self.links + 1):
            tensor = reduce(tensor, f"bench {self.bytes} {link}")
            tensor = tensor * self.scale if link % self.period == 0 else tensor
        return tensor

    def check(self, engine: str, result: Any) -> None:
        """Compare a chain's result with NumPy's, element by element.

        Raises:
            WrongResultError: The results differ; the message names the first wrong element.
        """
        if result.shape != self.expected.shape:
            raise WrongResultError(explain("An allreduce must keep the shape", engine=engine, size=self.label,
                                           shape=list(result.shape), expected=list(self.expected.shape)))
        right = np.abs(result - self.expected) <= self._tolerance * self.expected  # false for NaN as well
        if not right.all():
            wrong = np.flatnonzero(~right)
            first = int(wrong[0])
            raise WrongResultError(explain(
                "Every element of an allreduce must be what NumPy computes", engine=engine, size=self.label,
                element=first, got=float(result[first]), expected=float(self.expected[first]),
                wrong_elements=len(wrong), elements=len(right)))


class Chain(Participant):
    """A chain inside one `tf.function`.

    Args:
        row: Row for the results.
        task: Input and expected results.
        reduce: Function of a tensor and a name that sums the tensor over the ranks.
        scope: Runs the body of the function; for `tf.distribute`, in a replica context.
    """

    def __init__(self, row: BenchmarkRow, task: AllreduceTask, reduce: Reduce,
                 scope: Callable[..., Any] | None = None) -> None:
        self.row, self._task = row, task
        row.links, row.bytes = task.links, task.bytes

        def body(tensor: Any) -> Any:
            return task.chained(reduce, tensor)

        self._function = tf.function((lambda tensor: scope(body, tensor)) if scope else body, autograph=False)
        self._input: Any = None
        self._result: Any = None

    def prepare(self) -> None:
        """Trace the chain, run it once, and verify the result."""
        self._input = tf.constant(self._task.own)
        self.run(1)
        self.check()

    def run(self, calls: int) -> None:
        """Run the chain `calls` times synchronously."""
        for _ in range(calls):
            self._result = None  # free its memory for the next call
            self._result = self._function(self._input)

    def check(self) -> None:
        """Verify the last result."""
        self._task.check(self.row.name, self._result.numpy())


class MpiChain(Participant):
    """The same chain with MPI on NumPy arrays, without TensorFlow, as a reference."""

    def __init__(self, row: BenchmarkRow, task: AllreduceTask, world: Any) -> None:
        self.row, self._task, self._world = row, task, world
        row.links, row.bytes = task.links, task.bytes
        self._result: Any = None

    def prepare(self) -> None:
        """Run the chain once, and verify the result."""
        self._buffers = np.empty_like(self._task.own), np.empty_like(self._task.own)
        self.run(1)
        self.check()

    def run(self, calls: int) -> None:
        """Run the chain `calls` times."""
        def reduce(array: Any, _: str) -> Any:
            out = self._buffers[array is self._buffers[0]]
            self._world.Allreduce(array, out)
            return out

        for _ in range(calls):
            self._result = self._task.chained(reduce, self._task.own)

    def check(self) -> None:
        """Verify the last result."""
        self._task.check(self.row.name, self._result)


def participants(stage: Stage, label: str) -> list[Participant]:
    """Return the chains of one job.

    Args:
        stage: Plan, ranks and peer of the job.
        label: The size as the user wrote it.
    """
    ranks, peer = stage.ranks, stage.peer
    task = AllreduceTask(label, ranks.rank, ranks.size, stage.plan.links)
    if stage.plan.backend == TCP:
        row = BenchmarkRow(label, TCP_ALONE, REFERENCE, "a plain stream from each host to the next")
        return [Streams(row, task.bytes, ranks)]
    if not stage.plan.backend:
        description = "MPI on NumPy's arrays, no TensorFlow"
        return [MpiChain(BenchmarkRow(label, MPI_ALONE, REFERENCE, description), task, peers.mpi(ranks))]
    backend, everyone = ranks.session.backend, list(range(ranks.size))

    def reduce(tensor: Any, name: str) -> Any:
        return backend.allreduce([tensor], name, Reduction.SUM, everyone)[0]

    row = BenchmarkRow(label, backend.name, engine=backend.engine, memory=stage.memory)
    made: list[Participant] = [Chain(row, task, reduce)]
    if peer is not None:
        row = BenchmarkRow(label, title_of(backend.name), PEER, peer.engine, peer.reason)
        made.append(Chain(row, task, peer.reduce, peer.scope))
    return made
