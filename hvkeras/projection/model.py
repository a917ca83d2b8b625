"""The model of a job: an engine as it was measured within a host, hosts and a network as they are assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvkeras.projection import cost
from hvkeras.projection.cost import Link
from hvkeras.projection.pipeline import exposed

RING, HIERARCHICAL, RECURSIVE = "ring", "hierarchical", "recursive"
ALGORITHMS = (RING, HIERARCHICAL, RECURSIVE)
# What backends do among hosts, and the share of a network's bandwidth that they reach with 1 MiB or more, as measured:
# docs/projection.md. What else there is goes round a ring of all ranks.
ENGINES = {"native": (HIERARCHICAL, 0.65)}


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, once a step.

    Attributes:
        size: Bytes.
        lead: Seconds before the end of the backward pass at which it is ready.
        seconds: What its allreduce took where it was measured; 0 if unknown.
    """

    size: int
    lead: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Engine:
    """An engine as it was measured within a host, where an allreduce takes `start` and a ring over `inside`.

    Attributes:
        algorithm: One of `ALGORITHMS`, for what it does among hosts.
        start: Seconds that any allreduce takes.
        inside: The way between two ranks of a host, all the engine's work on a byte included.
        share: Of a network's bandwidth, what it reaches.
    """

    algorithm: str
    start: float
    inside: Link
    share: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """The hosts and the network that are assumed.

    Attributes:
        ranks_per_host: How many ranks a host has.
        latency: Seconds that a message between two hosts takes, however short.
        bandwidth: Bytes per second that a host can send while it receives as many.
    """

    ranks_per_host: int
    latency: float
    bandwidth: float

    def hosts(self, ranks: int) -> int:
        """How many hosts so many ranks need."""
        return -(-ranks // self.ranks_per_host)


def engine_of(backend: str, sizes: Sequence[float], seconds: Sequence[float], ranks: int,
              algorithm: str | None = None) -> Engine:
    """Describes a backend's engine by what allreduces took within a host.

    The line through the times is the one with the least relative errors, and has no negative part: with one size,
    all of the time is the bytes'.

    Args:
        backend: The backend.
        sizes: Bytes of each allreduce.
        seconds: What each took.
        ranks: How many ranks took part, 2 at least.
        algorithm: What it does among hosts; by default, what it does in fact.
    """
    own, share = ENGINES.get(backend, (RING, 1.0))
    # Seconds that each would take at a byte per second, and what it took.
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
    return Engine(algorithm or own, start, Link(0.0, 1 / per_byte), share)


def allreduce(size: float, ranks: int, engine: Engine, cluster: Cluster) -> float:
    """Seconds of an allreduce of so many bytes."""
    if ranks == 1:
        return 0.0
    hosts, on_each = cluster.hosts(ranks), min(ranks, cluster.ranks_per_host)
    if hosts == 1:
        return engine.start + cost.ring(size, ranks, engine.inside)
    reached = engine.share * cluster.bandwidth
    if engine.algorithm == RECURSIVE:  # all ranks of a host exchange with other hosts at once
        shared = Link(cluster.latency, min(reached / on_each, engine.inside.bandwidth))
        return engine.start + cost.recursive(size, ranks, shared)
    between = Link(cluster.latency, min(reached, engine.inside.bandwidth))
    if engine.algorithm == HIERARCHICAL:
        return engine.start + cost.hierarchical(size, hosts, on_each, engine.inside, between)
    return engine.start + cost.ring(size, ranks, between)


def step(rest: float, buckets: Sequence[Bucket], ranks: int, engine: Engine, cluster: Cluster,
         factor: float = 1.0) -> float:
    """Seconds of a training step.

    Args:
        rest: All of the step but the communication that nothing runs beside.
        buckets: What travels, in order.
        ranks: How many ranks.
        engine: What carries it.
        cluster: Over what.
        factor: By how much allreduces take longer than the model says.
    """
    durations = [factor * allreduce(bucket.size, ranks, engine, cluster) for bucket in buckets]
    return rest + exposed([bucket.lead for bucket in buckets], durations)
