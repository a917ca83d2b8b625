"""Compares what `measure.py` has measured with what the cost model says, and prints tables for docs/projection.md.

Engines are fitted to the job of two ranks on one host; the network's bandwidth is what a plain TCP connection found,
and its latency the default of the flags.

    python tools/projection/judge.py measured.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.gradients.reducer import pack
from hvkeras.projection.arguments import LATENCY
from hvkeras.projection.model import Bucket, Cluster, Engine, allreduce, engine_of, step
from hvkeras.settings import size_in_bytes

BUCKET = 4 * 1024**2  # as measure.py says
BACKWARD = 2 / 3  # of a step without communication: twice as much work as the forward pass
CALIBRATION = "1x2"
CORES = 2  # of the machine that measured
FASTEST = "10gbit"


@dataclass(frozen=True)
class Row:
    """A measured time beside the model's.

    Attributes:
        backend: The engine.
        layout: Hosts x ranks on each.
        rate: The bandwidth that was set.
        what: An allreduce of a size, or a step of a model.
        measured: Quartiles in seconds.
        predicted: Seconds.
    """

    backend: str
    layout: str
    rate: str
    what: str
    measured: tuple[float, float, float]
    predicted: float

    @property
    def ranks(self) -> int:
        """How many ranks took part."""
        hosts, on_each = map(int, self.layout.split("x"))
        return hosts * on_each

    @property
    def is_small(self) -> bool:
        """Whether it is an allreduce of less than 1 MiB."""
        return self.what.startswith("allreduce") and size_in_bytes(self.what.split()[1]) < 1024**2

    @property
    def ratio(self) -> float:
        """How many times as long as predicted it took."""
        return self.measured[1] / self.predicted


def main() -> None:
    """Prints the tables: each engine, all points, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    jobs = json.loads(parser.parse_args().measured.read_text())
    engines = {job["backend"]: _engine(job) for job in jobs if job["layout"] == CALIBRATION}
    for name, engine in engines.items():
        print(f"{name}: {1e6 * engine.start:.0f} us, {engine.inside.bandwidth / 1e9:.2f} GB/s")
    rows = [row for job in jobs if not job["layout"].startswith("1x") for row in _rows(job, engines[job["backend"]])]
    _print_rows([row for row in rows if row.what.startswith("allreduce")], "allreduce ")
    _print_rows([row for row in rows if row.what.startswith("step")], "step ")
    _print_summary(rows)


def _engine(job: Mapping[str, Any]) -> Engine:
    found = {what.split()[1]: times for what, times in job["measured"]["unlimited"].items() if "allreduce" in what}
    return engine_of(job["backend"], [size_in_bytes(label) for label in found],
                     [float(np.median(times)) for times in found.values()], job["ranks"])


def _rows(job: Mapping[str, Any], engine: Engine) -> Iterator[Row]:
    on_each = int(job["layout"].split("x")[1])
    for rate, times in job["measured"].items():
        cluster = Cluster(on_each, LATENCY, float(np.median(times["bandwidth"])))
        for what, seconds in times.items():
            kind, _, name = what.partition(" ")
            lower, median, upper = (float(each) for each in np.percentile(seconds, (25, 50, 75)))
            if kind == "allreduce":
                predicted = allreduce(size_in_bytes(name), job["ranks"], engine, cluster)
            elif kind == "step":
                rest = float(np.median(times[f"compute {name}"]))
                buckets = _buckets(job["models"][name]["gradients"], BACKWARD * rest)
                predicted = step(rest, buckets, job["ranks"], engine, cluster)
            else:
                continue
            yield Row(job["backend"], job["layout"], rate, what, (lower, median, upper), predicted)


def _buckets(gradients: Sequence[int], backward: float) -> list[Bucket]:
    """The buckets that hvkeras makes of gradients."""
    order = list(reversed(range(len(gradients))))
    plan = pack(order, dict.fromkeys(order, "float32"), dict(enumerate(gradients)), BUCKET)
    sizes = [sum(gradients[place] for place in bucket) for bucket in plan]
    return [Bucket(size, lead) for size, lead in zip(sizes, _spread(sizes, backward), strict=True)]


def _spread(sizes: Sequence[float], backward: float) -> list[float]:
    """How long before the end of the backward pass buckets are ready, at an even pace by bytes."""
    return [backward * (1 - done / sum(sizes)) for done in itertools.accumulate(sizes)]


def _print_rows(rows: Sequence[Row], prefix: str) -> None:
    """A line for each backend, layout and rate; in its cells milliseconds, and how many times the prediction."""
    whats = list(dict.fromkeys(row.what for row in rows))
    print("\n| backend | hosts x ranks | network |", *(f"{what.removeprefix(prefix)} |" for what in whats))
    print("| --- " * (3 + len(whats)) + "|")
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row.backend, row.layout, row.rate), {})[row.what] = row
    for (backend, layout, rate), cells in lines.items():
        print(f"| {backend} | {layout} | {rate} |",
              *(f"{_milliseconds(cells[what].measured[1])} ({cells[what].ratio:.2f}) |" for what in whats))


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _print_summary(rows: Sequence[Row]) -> None:
    """How many times as long as predicted it took: by what there was of cores and network."""
    print("\n| cores | network | what | backend | points | measured / predicted: median | half of them | all |")
    print("| --- " * 8 + "|")
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in sorted(rows, key=lambda row: (row.ranks, row.rate == FASTEST, row.is_small, row.what[0])):
        kind = f"{row.what.split()[0]}s{' below 1 MiB' if row.is_small else ''}"
        cores = "one per rank" if row.ranks == CORES else "half per rank"
        network = "10 Gbit/s" if row.rate == FASTEST else "100 Mbit/s, 1 Gbit/s"
        groups.setdefault((cores, network, kind, row.backend), []).append(row.ratio)
    for group, ratios in groups.items():
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        print(f"| {' | '.join(group)} | {len(ratios)} | {middle:.2f} | {low:.2f} to {high:.2f} |"
              f" {min(ratios):.2f} to {max(ratios):.2f} |")


if __name__ == "__main__":
    main()
