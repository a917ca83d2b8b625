"""Time breakdown of training steps: what each rank measures, and the figures derived from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvkeras.profiling import collective_times

STEP_TIME, COMMUNICATION, WAIT = "ranks/step_time_ms", "ranks/communication_ms", "ranks/wait_ms"
LATEST = 512  # maximum number of an epoch's executions that are considered

_TICK = 1e-5  # seconds that TensorFlow's clock may lag behind Python's: it has microsecond resolution

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Execution:
    """One call of the train function: start and end in seconds since the epoch, and its first and last step."""

    began: float
    ended: float
    first: int
    last: int


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured in an epoch.

    Attributes:
        steps: The number of steps measured.
        seconds: Their total duration, including callbacks between them.
        collectives: Start and end of the collectives in these steps, by key: float64, [runs, 2].
    """

    steps: int
    seconds: float
    collectives: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, executions: Sequence[Execution], collected: Mapping[str, Array]) -> RankTimes:
        """Summarizes the given executions, as far as all of their collectives are known.

        Args:
            executions: The executions of one epoch, in order.
            collected: What `collective_times.collected` returns.
        """
        known = _known_since(collected, executions[0].began if executions else 0.0)
        seen = [execution for execution in executions if execution.began >= known]
        if not seen:
            return cls(0, 0.0)
        since, until = seen[0].began - _TICK, seen[-1].ended
        within = {key: rows[(rows[:, 0] >= since) & (rows[:, 0] < until)] for key, rows in collected.items()}
        return cls(seen[-1].last + 1 - seen[0].first, until - seen[0].began,
                   {key: rows for key, rows in within.items() if len(rows)})


def _known_since(collected: Mapping[str, Array], began: float) -> float:
    """The time from which on no run of a collective has been lost; `began` at the earliest."""
    full = [float(rows[0, 0]) for rows in collected.values() if len(rows) >= collective_times.CAPACITY]
    return max([began, *full])


def figures(everyone: Mapping[int, RankTimes]) -> dict[int, dict[str, float]]:
    """Milliseconds per step, by rank and tag.

    A rank's communication is the time during which at least one collective of the step was running on it. Its wait is
    the part of that time that it would have saved by arriving last: the time it spent in a collective beyond the
    shortest time that any rank spent in the same one. Clocks of different ranks are never compared.

    Args:
        everyone: The times of all ranks, or of the chief alone, for which no wait can be computed.
    """
    shortest = _shortest(everyone)
    found: dict[int, dict[str, float]] = {}
    for rank, times in everyone.items():
        if not times.steps:
            continue
        found[rank] = {STEP_TIME: 1000 * times.seconds / times.steps}
        if not times.collectives:
            continue
        found[rank][COMMUNICATION] = 1000 * _covered(list(times.collectives.values())) / times.steps
        if len(everyone) > 1:
            waits = []
            for key, rows in times.collectives.items():
                latest = rows[len(rows) - len(shortest[key]):]
                waits.append(np.stack([latest[:, 0], latest[:, 1] - shortest[key]], axis=1))
            found[rank][WAIT] = 1000 * _covered(waits) / times.steps
    return found


def _shortest(everyone: Mapping[int, RankTimes]) -> dict[str, Array]:
    """The shortest time that any rank spent in each run of each collective, for the latest runs known to all ranks."""
    shortest = {}
    for key in dict.fromkeys(key for times in everyone.values() for key in times.collectives):
        runs = [times.collectives[key] for times in everyone.values() if key in times.collectives]
        count = min(len(rows) for rows in runs)
        shortest[key] = np.min([rows[len(rows) - count:, 1] - rows[len(rows) - count:, 0] for rows in runs], axis=0)
    return shortest


def _covered(spans: Sequence[Array]) -> float:
    """The length of the union of intervals, each a row of start and end."""
    rows = np.concatenate(spans)
    rows = rows[np.argsort(rows[:, 0])]
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], rows[:-1, 1]]))
    return float(np.maximum(rows[:, 1] - np.maximum(rows[:, 0], reached), 0.0).sum())
