"""Time breakdown of training steps per epoch: each rank's measurements, and metrics derived from all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hvkeras.diagnostics.record import Array
from hvkeras.diagnostics.ring_buffer import Rows
from hvkeras.diagnostics.time_split import Cover, shortest_times

STEP_TIME, COMMUNICATION, WAIT = "ranks/step_time_ms", "ranks/communication_ms", "ranks/wait_ms"
LATEST = 512  # maximum number of an epoch's executions to consider

_TICK = 1e-5  # seconds that TensorFlow's clock may lag behind Python's, because of its microsecond resolution


@dataclass(frozen=True)
class RankTimes:
    """Measurements of one rank in an epoch.

    Attributes:
        seconds: Total duration of these steps, including callbacks between them.
        collectives: Start and end of the collectives in these steps, by key: float64, [runs, 2].
    """

    steps: int
    seconds: float
    collectives: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, executions: Array, collectives: Mapping[str, Rows]) -> RankTimes:
        """Summarize the executions whose collectives are all known.

        Args:
            executions: float64, [n, 4]: start and end of each execution of an epoch, and its first and last step.
            collectives: Latest runs of the collectives, by key.
        """
        known = max((rows.table[0, 0] for rows in collectives.values() if rows.first), default=-np.inf)
        complete = executions[executions[:, 0] >= known]
        if not len(complete):
            return cls(0, 0.0)
        (began, *_, first, _), (_, ended, _, last) = complete[[0, -1]].tolist()
        within = {key: rows.table[(rows.table[:, 0] >= began - _TICK) & (rows.table[:, 0] < ended)]
                  for key, rows in collectives.items()}
        return cls(int(last) + 1 - int(first), ended - began, {key: rows for key, rows in within.items() if len(rows)})


def figures(everyone: Mapping[int, RankTimes]) -> dict[int, dict[str, float]]:
    """Return milliseconds per step, by rank and tag.

    Communication time is the time during which at least one collective of the step was running on the rank. Wait time
    is the part of it that the rank would have saved by arriving last: its time in a collective beyond the shortest time
    of any rank in the same run. Clocks of different ranks are never compared.

    Args:
        everyone: Times of all ranks, or of the chief alone, for which no wait time can be computed.
    """
    # The latest runs are the same on all ranks, so they are numbered from the end.
    compared = shortest_times([{key: (rows, -len(rows)) for key, rows in times.collectives.items()}
                         for times in everyone.values()])
    found: dict[int, dict[str, float]] = {}
    for rank, times in everyone.items():
        if not times.steps:
            continue
        found[rank] = {STEP_TIME: 1000 * times.seconds / times.steps}
        if not times.collectives:
            continue
        found[rank][COMMUNICATION] = 1000 * Cover(*times.collectives.values()).length / times.steps
        if len(everyone) > 1:
            waits = []
            for key, rows in times.collectives.items():
                lengths, first = compared[key]
                waits.append(np.column_stack([rows[first:, 0], rows[first:, 1] - lengths]))
            found[rank][WAIT] = 1000 * Cover(*waits).length / times.steps
    return found
