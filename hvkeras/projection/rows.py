"""The rows of a projection: one for each backend of a comparison and each number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvkeras.projection.model import Cluster, Engine, engine_of, step
from hvkeras.projection.observed import Observed, observed
from hvkeras.records.record import Record

ONE_PROCESS = "one process"

# Ratios of measured to modelled allreduce times, from validation measurements: docs/projection.md.
FASTEST, SLOWEST = 0.8, 1.4


class Measured(Protocol):
    """A job of a comparison: backend, ranks, failure, quartiles of the step time in seconds, and samples per second."""

    @property
    def name(self) -> str: ...  # noqa: D102 - see above

    @property
    def processes(self) -> int: ...  # noqa: D102

    @property
    def reason(self) -> str: ...  # noqa: D102

    @property
    def step(self) -> tuple[float, float, float] | None: ...  # noqa: D102

    @property
    def samples(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True)
class Projection:
    """A row: the projected performance of a backend on a number of ranks. It is never measured.

    Attributes:
        backend: The backend.
        ranks: The number of ranks.
        hosts: The number of hosts.
        algorithm: The algorithm between hosts.
        step: Seconds of a step.
        low: The lower end of the step's range: the lower quartile, with the model's error in the backend's favour.
        high: The upper end of the step's range: the upper quartile, with the model's error against the backend.
        samples: Samples of all ranks per second; None if unknown.
        share: The scaling efficiency relative to one process; None if unknown.
    """

    backend: str
    ranks: int
    hosts: int
    algorithm: str
    step: float
    low: float
    high: float
    samples: float | None
    share: float | None

    @property
    def samples_range(self) -> tuple[float, float] | None:
        """Samples per second with the slowest and the fastest step; None if unknown."""
        return None if self.samples is None else (self.samples * self.step / self.high,
                                                  self.samples * self.step / self.low)


@dataclass(frozen=True)
class Projected:
    """The result of a projection.

    Attributes:
        rows: The rows: backend by backend, ranks ascending.
        reasons: For each backend that has no rows, a line that says why.
        cluster: The assumed hosts and network.
    """

    rows: tuple[Projection, ...]
    reasons: tuple[str, ...]
    cluster: Cluster

    @property
    def explanation(self) -> str:
        """The assumptions, in one line; "" if nothing was projected."""
        algorithms: dict[str, list[str]] = {}
        for row in self.rows:
            names = algorithms.setdefault(row.algorithm, [])
            names += [row.backend] * (row.backend not in names)
        words = "; ".join(f"{algorithm} for {', '.join(names)}" for algorithm, names in algorithms.items())
        return words and (
            f"projection: by a cost model ({words}), not measured, with {self.cluster.ranks_per_host} ranks per host, "
            f" {self.cluster.bandwidth * 8 / 1e9:g} Gbit/s and {self.cluster.latency * 1e6:g} us between hosts, and"
            " hosts that compute like this one; range: the quartiles of the step and the model's error;"
            " docs/projection.md")

    def to_json(self) -> dict[str, Any]:
        """The result as plain data; every row is marked as a projection, to distinguish it from measurements."""
        return {
            "assumed": {"ranks_per_host": self.cluster.ranks_per_host, "network_latency_s": self.cluster.latency,
                        "network_bytes_per_s": self.cluster.bandwidth},
            "rows": [_json(row) for row in self.rows],
            "reasons": list(self.reasons),
        }


def _json(row: Projection) -> dict[str, Any]:
    return {"projection": True, "backend": row.backend, "processes": row.ranks, "hosts": row.hosts,
            "algorithm": row.algorithm, "step_ms": 1000 * row.step, "step_ms_lower": 1000 * row.low,
            "step_ms_upper": 1000 * row.high, "samples_per_s": row.samples, "scaling_efficiency": row.share}


def projected(
    jobs: Sequence[tuple[Measured, Sequence[Record | None]]], counts: Sequence[int], cluster: Cluster,
    algorithm: str | None = None,
) -> Projected:
    """Projects each backend of a comparison, based on its job with the most ranks.

    Args:
        jobs: The measured jobs, each with the records of its ranks.
        counts: The numbers of ranks to project to.
        cluster: The assumed hosts and network.
        algorithm: The algorithm of all engines between hosts; by default, each engine's own.
    """
    rows: list[Projection] = []
    reasons = []
    single = next((job.samples for job, _ in jobs if job.name == ONE_PROCESS), None)
    largest: Mapping[str, tuple[Measured, Sequence[Record | None]]] = {
        job.name: (job, records) for job, records in sorted(jobs, key=lambda each: each[0].processes)
        if job.processes > 1 and job.name != ONE_PROCESS}
    for name, (job, records) in largest.items():
        found = "its job failed" if job.reason else observed(records)
        if isinstance(found, str) or job.step is None:
            reasons.append(f"no projection of {name}: {found if isinstance(found, str) else 'no step was timed'}")
            continue
        engine = engine_of(name, [bucket.size for bucket in found.buckets],
                           [bucket.seconds for bucket in found.buckets], found.ranks, algorithm)
        rows += [_row(job, found, engine, count, cluster, single) for count in counts]
    return Projected(tuple(rows), tuple(reasons), cluster)


def _row(job: Measured, found: Observed, engine: Engine, count: int, cluster: Cluster,
         single: float | None) -> Projection:
    assert job.step is not None
    rest = [max(seconds - found.exposed, 0.0) for seconds in job.step]
    low, middle, high = (step(seconds, found.buckets, count, engine, cluster, factor)
                         for seconds, factor in zip(rest, (FASTEST, 1.0, SLOWEST), strict=True))
    samples = None if job.samples is None else count * job.samples / job.processes * job.step[1] / middle
    share = None if samples is None or not single else samples / (count * single)
    return Projection(job.name, count, cluster.hosts(count), engine.algorithm, middle, low, high, samples, share)
