"""Rows of a benchmark, with the times of all blocks, and metrics derived from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from hvkeras.bench.plan import rate_of

ONE_PROCESS, LOCAL_ONLY, MPI_ALONE = "one process", "local only", "MPI alone"
FORWARD_BACKWARD, UPDATE = "forward and backward", "update"  # the parts of a step
ENGINE, PEER, REFERENCE = "engine", "peer", "reference"
TCP_ALONE = "TCP alone"
LOCAL_FIELDS = ("name", "blocks", "busy", "calls", "least")  # set by the benchmark process, not by the ranks

_PEERS = {"horovod": "horovod alone", "tfdist": "tf.distribute alone"}


def title_of(backend: str) -> str:
    """Return the row name of a backend's library without hvkeras; "" if it cannot be used directly."""
    return _PEERS.get(backend, "")


@dataclass
class BenchmarkRow:
    """Result of one participant on one piece of work.

    Attributes:
        work: Size of the allreduce as the user wrote it, or the model.
        name: The participant: a backend, `one process`, `local only`, or a library used without hvkeras.
        kind: `ENGINE`, `PEER` (a library used directly) or `REFERENCE` (a baseline for the others).
        engine: Description of the transport.
        reason: Why there is no result, or "".
        wrong: Whether the reason is a wrong result.
        blocks: Seconds of one allreduce or training step in each block: the mean over `calls` calls, `links` links, and
            the ranks.
        busy: CPU seconds of the same in each block, summed over all ranks.
        calls: Number of calls timed in each block.
        links: Number of dependent allreduces in a call; 1 for a step.
        bytes: Bytes of the tensor, or of all gradients.
        samples: Samples of all ranks in a step; 0 for an allreduce.
        memory: Bytes by which the peak resident memory rose during the engine's start, tracing and first calls, on the
            rank with the largest increase; None if unknown.
        difference: Distance of the weights from those of one process, as a fraction of the distance that they moved;
            None if not compared.
        rounding: The same distance for a change of only the last bits of the initial weights, which shows how strongly
            the training amplifies rounding errors.
        least: Minimum seconds of an allreduce at the bandwidth of the hosts' links; 0 if there is no limit.
        first: Seconds of the first step, including tracing and compilation; None for an allreduce.
        parts: Seconds of parts of a step in isolation, in each block: `FORWARD_BACKWARD`, and `UPDATE` with constant
            gradients. Empty for an allreduce, and for steps that have no parts.
    """

    work: str
    name: str
    kind: str = ENGINE
    engine: str = ""
    reason: str = ""
    wrong: bool = False
    blocks: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    calls: int = 0
    links: int = 1
    bytes: int = 0
    samples: int = 0
    memory: int | None = None
    difference: float | None = None
    rounding: float | None = None
    least: float = 0.0
    first: float | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchmarkRow:
        """Create a row from the result of `to_json`, ignoring unknown fields."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    lower, median, upper = np.percentile(values, (25, 50, 75))
    return float(lower), float(median), float(upper)


def bandwidth(size: int, seconds: float) -> float:
    """Return the algorithm bandwidth in bytes per second: the tensor's bytes divided by the time."""
    return size / seconds


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second: the load on each rank's link, comparable across numbers of ranks.

    An allreduce moves at least 2 (n - 1) / n times the tensor into and out of each rank, see
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """
    return bandwidth(size, seconds) * 2 * (ranks - 1) / ranks


def least_seconds(work: str, size: int, hosts: int) -> float:
    """Return the minimum seconds of an allreduce at the bandwidth of the hosts' links.

    Args:
        work: The piece of work, optionally with a bandwidth.
        size: Bytes of the tensor.

    Returns:
        Seconds; 0 without a bandwidth.
    """
    return 2 * (hosts - 1) / hosts * size / rate_of(work)


def share_of_bound(row: BenchmarkRow) -> float | None:
    """Return the ratio of `least_seconds` to the median time of a row; None if either is unknown."""
    return row.least / quartiles(row.blocks)[1] if row.least and row.blocks else None


def speed_up(of: BenchmarkRow, over: BenchmarkRow) -> float | None:
    """Return the speedup of one row over another: the median ratio of their times; None if a row has none.

    The rows of a run are interleaved, so they are compared round by round. This is robust against a machine that is
    temporarily slow.
    """
    if not of.blocks or not over.blocks:
        return None
    pairs = list(zip(over.blocks, of.blocks, strict=False))  # either may have fewer blocks
    return float(np.median([slow / fast for slow, fast in pairs]))


def rate(row: BenchmarkRow) -> float | None:
    """Return the samples per second over all ranks; None without a time."""
    return row.samples / quartiles(row.blocks)[1] if row.blocks and row.samples else None


def efficiency(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> float | None:
    """Return the scaling efficiency: the step time of a single process divided by that of a rank.

    Args:
        rows: All rows of the run.

    Returns:
        The efficiency, 1 if communication is free; None if the single process or the row has no time.
    """
    single = next((each for each in rows if each.work == row.work and each.name == ONE_PROCESS), None)
    return None if single is None else 1.0 if single is row else speed_up(row, single)


def part(row: BenchmarkRow, name: str) -> float | None:
    """Return the median seconds of a part of a step in isolation; None if unknown."""
    return quartiles(row.parts[name])[1] if row.parts.get(name) else None


def exposed(row: BenchmarkRow) -> float | None:
    """Return the exposed communication of a step: the seconds in which it does not overlap with computation.

    Returns:
        The median over the rounds of the step's time minus those of its parts. None if these are unknown, or if the row
        does not communicate.
    """
    if row.kind == REFERENCE or not all(row.parts.get(name) for name in (FORWARD_BACKWARD, UPDATE)):
        return None
    rounds = zip(row.blocks, row.parts[FORWARD_BACKWARD], row.parts[UPDATE], strict=False)
    return float(np.median([step - forward_backward - update for step, forward_backward, update in rounds]))


def with_figures(rows: Sequence[BenchmarkRow], ranks: int) -> list[dict[str, Any]]:
    """Convert each row to JSON-compatible data, with the metrics derived from its blocks.

    Returns:
        The data of `BenchmarkRow.to_json`, with `median`, `quartiles` and `speed_up` over each other row of the same
        work, by name. Allreduces have `algorithm_bandwidth`, `bus_bandwidth` and `share_of_bound`. Steps have
        `samples_per_second`, `efficiency`, `forward_backward`, `update` and `exposed_communication`.
    """
    done = []
    for row in rows:
        data = row.to_json()
        if row.blocks:
            lower, median, upper = quartiles(row.blocks)
            data |= {"median": median, "quartiles": [lower, upper]}
            data["speed_up"] = {other.name: speed_up(row, other) for other in rows
                                if other is not row and other.work == row.work and other.blocks}
            if row.samples:
                data |= {"samples_per_second": rate(row), "efficiency": efficiency(row, rows),
                         "forward_backward": part(row, FORWARD_BACKWARD), "update": part(row, UPDATE),
                         "exposed_communication": exposed(row)}
            else:
                data |= {"algorithm_bandwidth": bandwidth(row.bytes, median),
                         "bus_bandwidth": bus_bandwidth(row.bytes, median, ranks),
                         "share_of_bound": share_of_bound(row)}
        done.append(data)
    return done
