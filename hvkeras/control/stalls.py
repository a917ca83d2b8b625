"""Ranks that make no progress though they wait for no other rank, due to a dead data source or a hung callback.

Each rank measures how long it has made no progress, and where (`hvkeras.control.heartbeat.Watch`).
`hvkeras.control.deadlocks` handles ranks that wait for others or that others wait for. `listeners` are notified of
stalls in addition to the console, such as the record of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hvkeras.control.cause import CauseKind
from hvkeras.control.deadlocks import MAX_WARNINGS, Problem
from hvkeras.control.messages import Standstill
from hvkeras.host.console import format_numbers, format_ranks

listeners: list[Callable[[str], None]] = []


def note(stall: str) -> None:
    """Notifies all listeners of a stall.

    Args:
        stall: Which rank makes no progress, and where.
    """
    for listener in listeners:
        listener(stall)


BACKOFF = 2.0  # the next report of the same stall is due after this multiple of its duration so far


class Stalls:
    """Stores what ranks report, and finds those that have made no progress for too long.

    Args:
        warn_after: Seconds without progress until a rank reports its location; again after twice as long, and so on.
        stall_after: Seconds until the job ends; 0 for never.
    """

    def __init__(self, warn_after: float, stall_after: float) -> None:
        self.limits = (warn_after, stall_after)
        self._still: dict[int, Standstill] = {}
        self._next: dict[int, float] = {}

    def update(self, rank: int, still: Standstill | None) -> None:
        """Records what a rank reports about itself; None if it makes progress."""
        if still is not None:
            self._still[rank] = still
        else:
            self._still.pop(rank, None)
            self._next.pop(rank, None)

    @property
    def any_stands_still(self) -> bool:
        """Whether any rank reports that it makes no progress."""
        return bool(self._still)

    def check(self, waiting: Collection[int]) -> list[Problem]:
        """Finds the stalls that must be reported now.

        Args:
            waiting: The ranks that wait for others, or that others wait for, and those that have left.

        Returns:
            One with the rank that ends the job; else a warning for each rank that must report its location.
        """
        warn_after, stall_after = self.limits
        still = {rank: report for rank, report in sorted(self._still.items()) if rank not in waiting}
        over = [rank for rank, report in still.items() if stall_after and report.may_end
                and min(report.seconds, report.python_seconds) >= stall_after]
        if over:
            return [self._end(over, still)]
        due = [rank for rank, report in still.items() if warn_after
               and report.seconds >= self._next.get(rank, warn_after)]
        for rank in due:  # nobody knows how long a custom loop may take, so it is reported only once
            self._next[rank] = BACKOFF * still[rank].seconds if still[rank].in_loop else float("inf")
        return [Problem(None, rank, "" if rank > due[0] else self._more(due)) for rank in due[:MAX_WARNINGS]]

    def _end(self, over: list[int], still: dict[int, Standstill]) -> Problem:
        # A step function without progress may be in a collective that nobody counts, waiting for a rank elsewhere.
        rank = min(over, key=lambda rank: (still[rank].phase in ("train", "validation"), rank))
        others = [other for other in still if other != rank]
        also = f"; {format_ranks(others)} {'have' if len(others) > 1 else 'has'} not moved either" if others else ""
        return Problem(CauseKind.STALLED, rank, f"has not moved for {still[rank].seconds:.0f} s:"
                       f" {still[rank].text}{also} (HVKERAS_STALL_SHUTDOWN sets the limit)")

    @staticmethod
    def _more(due: list[int]) -> str:
        more = due[MAX_WARNINGS:]
        return f"{len(more)} more ranks are not moving either: {format_numbers(more)}" if more else ""
