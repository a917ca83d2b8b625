"""The model of a job: an engine measured within a host, and assumed hosts and network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvkeras.projection import cost
from hvkeras.projection.cost import Link
from hvkeras.projection.pipeline import exposed

RING, HIERARCHICAL, RECURSIVE = "ring", "hierarchical", "recursive"
ALGORITHMS = (RING, HIERARCHICAL, RECURSIVE)
# The algorithm that backends use between hosts: docs/projection.md. All other backends use a ring of all ranks.
ENGINES = {"native": HIERARCHICAL}


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, once per step.

    Attributes:
        size: Its size in bytes.
        lead: How many seconds before the end of the backward pass it is ready.
        seconds: The measured time of its allreduce; 0 if unknown.
    """

    size: int
    lead: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Engine:
    """An engine as measured within a host, where an allreduce takes `start` plus a ring over `inside`.

    Attributes:
        algorithm: Its algorithm between hosts, one of `ALGORITHMS`.
        start: Seconds that every allreduce takes, regardless of its size.
        inside: The link between two ranks of a host, including all of the engine's work per byte.
    """

    algorithm: str
    start: float
    inside: Link


@dataclass(frozen=True)
class Cluster:
    """The assumed hosts and network.

    Attributes:
        ranks_per_host: The number of ranks on a host.
        latency: Seconds that the shortest message between two hosts takes.
        bandwidth: Bytes per second that a host can send while it receives at the same rate.
    """

    ranks_per_host: int
    latency: float
    bandwidth: float

    def hosts(self, ranks: int) -> int:
        """The number of hosts that `ranks` ranks need."""
        return -(-ranks // self.ranks_per_host)


def engine_of(backend: str, sizes: Sequence[float], seconds: Sequence[float], ranks: int,
              algorithm: str | None = None) -> Engine:
    """Fits the model of a backend's engine to the times of allreduces within a host.

    The line through the times minimizes the squared relative errors, without negative coefficients. With a single
    size, all of the time is attributed to the bytes.

    Args:
        backend: The backend.
        sizes: Bytes of each allreduce.
        seconds: The time of each allreduce.
        ranks: The number of participating ranks, at least 2.
        algorithm: The algorithm between hosts; by default, the one that the backend uses.
    """
    # Seconds that each allreduce would take at one byte per second, and those that it took.
    unit = np.array([cost.ring(size, ranks, Link(0.0, 1.0)) for size in sizes])
    taken = np.array(seconds)
    start, per_byte = 0.0, float(np.mean(taken / unit))
    if len(set(sizes)) > 1:
        rows = np.stack([1 / taken, unit / taken], axis=1)
        start, per_byte = (float(each) for each in np.linalg.lstsq(rows, np.ones(len(taken)), rcond=None)[0])
        if start < 0:
            start, per_byte = 0.0, float(np.mean(taken / unit))
        elif per_byte <= 0:
            start, per_byte = float(np.mean(taken)), 1e-15
    return Engine(algorithm or ENGINES.get(backend, RING), start, Link(0.0, 1 / per_byte))


def allreduce(size: float, ranks: int, engine: Engine, cluster: Cluster) -> float:
    """Seconds of an allreduce of `size` bytes."""
    if ranks == 1:
        return 0.0
    hosts, on_each = cluster.hosts(ranks), min(ranks, cluster.ranks_per_host)
    if hosts == 1:
        return engine.start + cost.ring(size, ranks, engine.inside)
    if engine.algorithm == RECURSIVE:  # all ranks of a host exchange with other hosts at once
        shared = Link(cluster.latency, min(cluster.bandwidth / on_each, engine.inside.bandwidth))
        return engine.start + cost.recursive(size, ranks, shared)
    between = Link(cluster.latency, min(cluster.bandwidth, engine.inside.bandwidth))
    if engine.algorithm == HIERARCHICAL:
        return engine.start + cost.hierarchical(size, hosts, on_each, engine.inside, between)
    return engine.start + cost.ring(size, ranks, between)


def step(rest: float, buckets: Sequence[Bucket], ranks: int, engine: Engine, cluster: Cluster,
         factor: float = 1.0) -> float:
    """Seconds of a training step.

    Args:
        rest: The step's seconds without exposed communication.
        buckets: The buckets, in the order of their transfer.
        ranks: The number of ranks.
        engine: The engine that reduces them.
        cluster: The hosts and the network.
        factor: The ratio of actual to modelled allreduce times.
    """
    durations = [factor * allreduce(bucket.size, ranks, engine, cluster) for bucket in buckets]
    return rest + exposed([bucket.lead for bucket in buckets], durations)
