"""Ranks that do not move, though they wait for no other rank: a dead source of data, a callback that hangs.

Each rank tells how long it has stood still, and where (`hvkeras.control.progress_watch`). Ranks that wait for others,
or that others wait for, are a matter of `hvkeras.control.waits`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hvkeras.control.waits import Finding

AT_ONCE = 8  # ranks that are asked where they are at the same time
RARER = 2.0  # how many times as long the next telling of the same stall waits


class Stalls:
    """Keeps what ranks say, and finds those that have stood still for too long.

    Args:
        warn_after: Seconds without a movement until a rank says where it is; then after twice as long, and so on.
        stall_after: Seconds until the job ends; 0 for never.
    """

    def __init__(self, warn_after: float, stall_after: float) -> None:
        self._warn_after, self._stall_after = warn_after, stall_after
        self._still: dict[int, dict[str, Any]] = {}
        self._next: dict[int, float] = {}

    def update(self, rank: int, still: dict[str, Any] | None) -> None:
        """Learns what a rank says of itself; None of one that moves."""
        if still is not None:
            self._still[rank] = still
        else:
            self._still.pop(rank, None)
            self._next.pop(rank, None)

    def check(self, waiting: Collection[int]) -> list[Finding]:
        """Finds what is wrong now.

        Args:
            waiting: The ranks that wait for others, or that others wait for, and those that have left.

        Returns:
            `stalled` with the rank that ends the job; else `warning` with each rank that shall say where it is.
        """
        still = {rank: said for rank, said in sorted(self._still.items()) if rank not in waiting}
        over = [rank for rank, said in still.items() if self._stall_after and said["may_end"]
                and min(said["for"], said["stood"]) >= self._stall_after]
        if over:
            return [self._end(over, still)]
        due = [rank for rank, said in still.items() if self._warn_after
               and said["for"] >= self._next.get(rank, self._warn_after)]
        for rank in due:  # of a loop of the user's own nobody knows how long it may take: it is told once
            self._next[rank] = RARER * still[rank]["for"] if still[rank]["within"] else float("inf")
        return [Finding("warning", rank, self._more(due)) for rank in due[:AT_ONCE]]

    def _end(self, over: list[int], still: dict[int, dict[str, Any]]) -> Finding:
        # Where a step's function stands still, it may wait for a rank that is elsewhere in a collective nobody counts.
        rank = min(over, key=lambda rank: (still[rank]["phase"] in ("train", "validation"), rank))
        others = [str(other) for other in still if other != rank]
        also = f"; nor {'have ranks' if len(others) > 1 else 'has rank'} {', '.join(others)}" if others else ""
        return Finding("stalled", rank, f"has not moved for {still[rank]['for']:.0f} s: {still[rank]['text']}{also}"
                       " (HVKERAS_STALL_SHUTDOWN sets how long it may)")

    @staticmethod
    def _more(due: list[int]) -> str:
        more = due[AT_ONCE:]
        return f"{len(more)} more ranks do not move either: {', '.join(map(str, more))}" if more else ""
