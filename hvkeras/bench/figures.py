"""Benchmark metrics: quartiles, bandwidths, speed-ups and efficiencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvkeras.bench.plan import rate_of
from hvkeras.bench.row import FORWARD_BACKWARD, ONE_PROCESS, REFERENCE, UPDATE, Row


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
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
    """The time that an allreduce takes at least, since each host must send and receive so much of the tensor.

    Args:
        work: The piece of work, which may name the bandwidth of the hosts' cables.
        size: Bytes of the tensor.
        hosts: The number of hosts.

    Returns:
        Seconds; 0 if there is no such bandwidth.
    """
    return 2 * (hosts - 1) / hosts * size / rate_of(work)


def share_of_bound(row: Row) -> float | None:
    """The share of that time in the median time of a row; None if either is unknown."""
    return row.least / quartiles(row.blocks)[1] if row.least and row.blocks else None


def speed_up(of: Row, over: Row) -> float | None:
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


def rate(row: Row) -> float | None:
    """Samples per second over all ranks; None without a time."""
    return row.samples / quartiles(row.blocks)[1] if row.blocks and row.samples else None


def efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    """Scaling efficiency: the step time of a single process divided by that of a rank; 1 if communication were free.

    Args:
        row: A row of training steps.
        rows: All rows of the run.

    Returns:
        The efficiency; None if the single process or the row has no time.
    """
    single = next((each for each in rows if each.work == row.work and each.name == ONE_PROCESS), None)
    return None if single is None else 1.0 if single is row else speed_up(row, single)


def part(row: Row, name: str) -> float | None:
    """The median seconds of a part of a step that runs alone; None if the row has no such times."""
    return quartiles(row.parts[name])[1] if row.parts.get(name) else None


def exposed(row: Row) -> float | None:
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


def with_figures(rows: Sequence[Row], ranks: int) -> list[dict[str, Any]]:
    """Converts each row to plain data, with the metrics derived from its blocks.

    Args:
        rows: The rows of one run.
        ranks: The number of ranks in it.

    Returns:
        The data of `Row.to_json`, with `median`, `quartiles`, `speed_up` over each other row of the same work by
        name, and `algorithm_bandwidth` and `bus_bandwidth`, or `samples_per_second`, `efficiency`, and the parts of a
        step: `forward_backward`, `update` and `exposed_communication`.
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
