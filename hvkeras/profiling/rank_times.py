"""Where the time of training steps goes: what each rank measures, and what all of it says together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvkeras.profiling import collective_times

STEP_TIME, COMMUNICATION, WAIT = "ranks/step_time_ms", "ranks/communication_ms", "ranks/wait_ms"
LATEST = 512  # executions of an epoch that are looked at, at most

_TICK = 1e-5  # seconds by which TensorFlow's clock may lag behind Python's: it counts whole microseconds

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Execution:
    """One call of the train function: seconds since the epoch, and the numbers of its first and last step."""

    began: float
    ended: float
    first: int
    last: int


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured of an epoch.

    Attributes:
        steps: The steps that were measured.
        seconds: How long they took together, with what callbacks did between them.
        collectives: When the collectives in them began and ended, by key: float64, [runs, 2].
    """

    steps: int
    seconds: float
    collectives: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, executions: Sequence[Execution], collected: Mapping[str, Array]) -> RankTimes:
        """Puts together what is known of all given executions.

        Args:
            executions: Those of one epoch, one after the other.
            collected: What `stamps.collected` returns.
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
    """From when on no run of a collective is lost, counted from `began`."""
    full = [float(rows[0, 0]) for rows in collected.values() if len(rows) >= collective_times.CAPACITY]
    return max([began, *full])


def figures(everyone: Mapping[int, RankTimes]) -> dict[int, dict[str, float]]:
    """Milliseconds in each step by rank and tag.

    A rank's communication is the time in which at least one collective of the step was running on it. Its wait is the
    part of that which it would have been spared had it come last: the time in a collective beyond the shortest that any
    rank was in the same one. So no two ranks' clocks are compared.

    Args:
        everyone: The times of all ranks, or of the chief alone, which says nothing of its wait.
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
    """The shortest time that a rank was in each run of each collective; the latest runs that all ranks know of."""
    shortest = {}
    for key in dict.fromkeys(key for times in everyone.values() for key in times.collectives):
        runs = [times.collectives[key] for times in everyone.values() if key in times.collectives]
        count = min(len(rows) for rows in runs)
        shortest[key] = np.min([rows[len(rows) - count:, 1] - rows[len(rows) - count:, 0] for rows in runs], axis=0)
    return shortest


def _covered(spans: Sequence[Array]) -> float:
    """The length of the union of intervals, each a row of begin and end."""
    rows = np.concatenate(spans)
    rows = rows[np.argsort(rows[:, 0])]
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], rows[:-1, 1]]))
    return float(np.maximum(rows[:, 1] - np.maximum(rows[:, 0], reached), 0.0).sum())
