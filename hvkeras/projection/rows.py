"""The rows of a projection: each backend of a comparison on each number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from hvkeras.launcher.comparison import ONE_PROCESS, Result
from hvkeras.projection.model import Bucket, Cluster, Engine, engine_of, step
from hvkeras.projection.observed import Observed, observed
from hvkeras.record import Record

# How much longer or shorter allreduces took than the model said, where both were measured: docs/projection.md.
FASTEST, SLOWEST = 0.7, 1.6


@dataclass(frozen=True)
class Projection:
    """A row: what a backend would do on so many ranks. Never measured.

    Attributes:
        backend: The backend.
        ranks: How many ranks.
        hosts: How many hosts.
        algorithm: What it does among hosts.
        step: Seconds of a step.
        low: The same if the model's error is to its advantage.
        high: The same if it is to its disadvantage.
        samples: Samples of all ranks per second; None if unknown.
        share: Of as many times the speed of one process; None if unknown.
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

    def to_json(self) -> dict[str, Any]:
        """The row for a file, with a mark that tells it from what was measured."""
        return {"projection": True, **dataclasses.asdict(self)}


def projected(
    jobs: Sequence[tuple[Result, Sequence[Record | None]]], counts: Sequence[int], cluster: Cluster,
    algorithm: str | None = None,
) -> tuple[list[Projection], list[str]]:
    """Projects each backend of a comparison, from its job with the most ranks.

    Args:
        jobs: The jobs that were measured, each with what its ranks recorded.
        counts: Numbers of ranks to project for.
        cluster: The hosts and the network that are assumed.
        algorithm: What all engines do among hosts; by default, what each does.

    Returns:
        The rows, and for each backend that has none a line that says why.
    """
    rows: list[Projection] = []
    reasons = []
    single = next((result.samples for result, _ in jobs if result.name == ONE_PROCESS), None)
    largest: Mapping[str, tuple[Result, Sequence[Record | None]]] = {
        job[0].name: job for job in sorted(jobs, key=lambda job: job[0].processes)
        if job[0].processes > 1 and job[0].name != ONE_PROCESS}
    for name, (result, records) in largest.items():
        found = "its job failed" if result.reason else observed(records)
        if isinstance(found, str) or result.step is None:
            reasons.append(f"no projection of {name}: {found if isinstance(found, str) else 'no step was timed'}")
            continue
        timed = [(bucket.size, bucket.seconds) for bucket in found.buckets if bucket.seconds is not None]
        engine = engine_of(name, [size for size, _ in timed], [seconds for _, seconds in timed], found.ranks, algorithm)
        rows += [_row(result, found, engine, count, cluster, single) for count in counts]
    return rows, reasons


def _row(result: Result, found: Observed, engine: Engine, count: int, cluster: Cluster,
         single: float | None) -> Projection:
    assert result.step is not None
    rest = [max(seconds - found.exposed, 0.0) for seconds in result.step]
    buckets: Sequence[Bucket] = found.buckets
    low, middle, high = (step(seconds, buckets, count, engine, cluster, factor)
                         for seconds, factor in zip(rest, (FASTEST, 1.0, SLOWEST), strict=True))
    of_a_rank = None if result.samples is None else result.samples * result.step[1] / result.processes
    samples = None if of_a_rank is None else count * of_a_rank / middle
    share = None if samples is None or not single else samples / (count * single)
    return Projection(result.name, count, cluster.hosts(count), engine.algorithm, middle, low, high, samples, share)


def table(rows: Sequence[Projection]) -> Table:
    """The rows, for a terminal."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for place, header in enumerate(("projection,\nnot measured", "ranks", "hosts", "step, ms\n(range)",
                                    "samples\nper s", "share of\nranks x one\nprocess")):
        made.add_column(header, justify="right" if place else "left", no_wrap=True, vertical="bottom")
    for row in rows:
        made.add_row(row.backend, f"{row.ranks:,}", f"{row.hosts:,}",
                     f"{_milliseconds(row.step)} ({_milliseconds(row.low)}-{_milliseconds(row.high)})",
                     "?" if row.samples is None else f"{row.samples:,.0f}",
                     "?" if row.share is None else f"{row.share:.0%}")
    return made


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def explanation(rows: Sequence[Projection], cluster: Cluster) -> str:
    """One line that says what was assumed."""
    ways: dict[str, list[str]] = {}
    for row in rows:
        names = ways.setdefault(row.algorithm, [])
        names += [row.backend] * (row.backend not in names)
    words = "; ".join(f"{way} for {', '.join(names)}" for way, names in ways.items())
    return (f"projection: by a cost model ({words}), not measured, with {cluster.ranks_per_host} ranks a host,"
            f" {cluster.bandwidth * 8 / 1e9:g} Gbit/s and {cluster.latency * 1e6:g} us between hosts, and hosts that"
            " compute as this one; range: the quartiles of the step and the model's error; docs/projection.md")
