"""One row of a benchmark (what ran, and the time of each of its blocks), and the metrics derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from hvkeras.bench.plan import rate_of

ONE_PROCESS, APART, MPI_ALONE = "one process", "apart", "MPI alone"
FORWARD_BACKWARD, UPDATE = "forward and backward", "update"  # the parts of a step
ENGINE, PEER, REFERENCE = "engine", "peer", "reference"
TCP_ALONE = "TCP alone"
KEPT_BY_THE_BENCHMARK = ("name", "blocks", "busy", "calls", "least")  # fields that ranks do not set

_PEERS = {"horovod": "horovod alone", "tfdist": "tf.distribute alone"}


def title_of(backend: str) -> str:
    """Return the name for using a backend's engine directly, without hvkeras; "" if that is not possible."""
    return _PEERS.get(backend, "")


@dataclass
class BenchmarkRow:
    """The result of one participant on one piece of work.

    Attributes:
        work: The size of the allreduce as the user wrote it, or the model.
        name: The participant: a backend, `one process`, or a library used without hvkeras.
        kind: `ENGINE`, `PEER` (a library used directly) or `REFERENCE` (a baseline for the others).
        engine: A description of what moves the bytes.
        reason: Why there is no result, or "".
        wrong: Whether the reason is that a result was wrong.
        blocks: Seconds of one allreduce or one training step, block by block: each the mean over `calls` calls
            and `links` links, and over the ranks.
        busy: Seconds of the processor that all ranks together took for the same, block by block.
        calls: The number of calls timed in each block.
        links: The number of allreduces in a call that depend on each other; 1 for a step.
        bytes: Bytes of the tensor, or of all gradients.
        samples: Samples of all ranks in a step; 0 for an allreduce.
        memory: By how many bytes the peak resident memory rose while the engine started, was traced and ran its
            first calls, on the rank where it rose most; None if unknown.
        difference: The distance of the weights from those that one process computes, as a fraction of the distance
            they moved; None if nothing was compared.
        rounding: The distance that the weights change, in the same measure, when only the last bits of the initial
            weights change: how strongly training this model amplifies rounding.
        least: Seconds that an allreduce takes at least at the bandwidth of the hosts' cables; 0 if there is none.
        first: Seconds of the first step, in which it is traced and compiled; None for an allreduce.
        parts: Seconds of a part of a step that runs alone, block by block, as in `blocks`: `FORWARD_BACKWARD`, and
            `UPDATE` with gradients that are there already. Empty for an allreduce, and where a step has no parts.
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
        """Return the row as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchmarkRow:
        """Read the output of `to_json`, ignoring unknown fields."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    lower, median, upper = np.percentile(values, (25, 50, 75))
    return float(lower), float(median), float(upper)


def bandwidth(size: int, seconds: float) -> float:
    """Algorithm bandwidth: the tensor's bytes divided by the time, in bytes per second."""
    return size / seconds


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bus bandwidth: the load on each rank's link in bytes per second, comparable across numbers of ranks.

    An allreduce moves at least 2 (n - 1) / n times the tensor into and out of each rank; see
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """
    return bandwidth(size, seconds) * 2 * (ranks - 1) / ranks


def least_seconds(work: str, size: int, hosts: int) -> float:
    """Return the time that an allreduce takes at least, since each host must send and receive so much of the tensor.

    Args:
        work: The piece of work, which may name the bandwidth of the hosts' cables.
        size: Bytes of the tensor.
        hosts: The number of hosts.

    Returns:
        Seconds; 0 if there is no such bandwidth.
    """
    return 2 * (hosts - 1) / hosts * size / rate_of(work)


def share_of_bound(row: BenchmarkRow) -> float | None:
    """Return the share of that time in the median time of a row; None if either is unknown."""
    return row.least / quartiles(row.blocks)[1] if row.least and row.blocks else None


def speed_up(of: BenchmarkRow, over: BenchmarkRow) -> float | None:
    """How many times as fast one row is as another.

    The rows of one run took turns, so they are compared round by round. The median ratio is therefore robust against
    a machine that is slower for a while.

    Args:
        of: The row that may be faster.
        over: The other one.

    Returns:
        The median ratio of the times; None if a row has none.
    """
    if not of.blocks or not over.blocks:
        return None
    pairs = list(zip(over.blocks, of.blocks, strict=False))  # either may have been cut short
    return float(np.median([slow / fast for slow, fast in pairs]))


def rate(row: BenchmarkRow) -> float | None:
    """Samples per second over all ranks; None without a time."""
    return row.samples / quartiles(row.blocks)[1] if row.blocks and row.samples else None


def efficiency(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> float | None:
    """Scaling efficiency: the step time of a single process divided by that of a rank; 1 if communication were free.

    Args:
        row: A row of training steps.
        rows: All rows of the run.

    Returns:
        The efficiency; None if the single process or the row has no time.
    """
    single = next((each for each in rows if each.work == row.work and each.name == ONE_PROCESS), None)
    return None if single is None else 1.0 if single is row else speed_up(row, single)


def part(row: BenchmarkRow, name: str) -> float | None:
    """Return the median seconds of a part of a step that runs alone; None if the row has no such times."""
    return quartiles(row.parts[name])[1] if row.parts.get(name) else None


def exposed(row: BenchmarkRow) -> float | None:
    """Seconds of communication in a step that its parts do not hide: what a step takes longer than both of them.

    Args:
        row: A row of training steps.

    Returns:
        The median over the rounds; None if the row has no such times, or does not communicate.
    """
    if row.kind == REFERENCE or not all(row.parts.get(name) for name in (FORWARD_BACKWARD, UPDATE)):
        return None
    rounds = zip(row.blocks, row.parts[FORWARD_BACKWARD], row.parts[UPDATE], strict=False)
    return float(np.median([step - forward_backward - update for step, forward_backward, update in rounds]))


def with_figures(rows: Sequence[BenchmarkRow], ranks: int) -> list[dict[str, Any]]:
    """Convert each row to plain data, with the metrics derived from its blocks.

    Args:
        rows: The rows of one run.
        ranks: The number of ranks in it.

    Returns:
        The data of `BenchmarkRow.to_json`, with `median`, `quartiles`, `speed_up` over each other row of the same work
        by name, and `algorithm_bandwidth` and `bus_bandwidth`, or `samples_per_second`, `efficiency`, and the parts of
        a step: `forward_backward`, `update` and `exposed_communication`.
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
