"""Ranks that make no progress though they wait for no other rank, due to a blocked data source or a hung callback.

Each rank measures how long it has made no progress, and where (`hvkeras.control.heartbeat.Watch`).
`hvkeras.control.deadlocks` handles ranks that wait for others or that others wait for. `listeners` receive stalls in
addition to the console; the recorder of this rank is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hvkeras.control.cause import CauseKind
from hvkeras.control.deadlocks import MAX_WARNINGS, Problem
from hvkeras.control.messages import Standstill
from hvkeras.host.console import format_numbers, format_ranks

listeners: list[Callable[[str], None]] = []


def notify(stall: str) -> None:
    """Notify all listeners of a stall.

    Args:
        stall: The rank without progress, and its location.
    """
    for listener in listeners:
        listener(stall)


BACKOFF = 2.0  # the next report of a stall is due after this multiple of its duration


class Stalls:
    """The ranks' reports about missing progress, from which stalls are detected.

    Args:
        warn_after: Seconds without progress until a rank must report its location; the interval then doubles.
        stall_after: Seconds until the job ends; 0 for never.
    """

    def __init__(self, warn_after: float, stall_after: float) -> None:
        self.limits = (warn_after, stall_after)
        self._stalled: dict[int, Standstill] = {}
        self._next: dict[int, float] = {}

    def update(self, rank: int, still: Standstill | None) -> None:
        """Record a rank's report; None if it makes progress."""
        if still is not None:
            self._stalled[rank] = still
        else:
            self._stalled.pop(rank, None)
            self._next.pop(rank, None)

    @property
    def any_stalled(self) -> bool:
        """True if any rank reports that it makes no progress."""
        return bool(self._stalled)

    def check(self, waiting: Collection[int]) -> list[Problem]:
        """Find the stalls that must be reported now.

        Args:
            waiting: The ranks that wait for others, or that others wait for, and those that have left.

        Returns:
            The problem that ends the job, if any; else a warning for each rank that must report its location.
        """
        warn_after, stall_after = self.limits
        still = {rank: report for rank, report in sorted(self._stalled.items()) if rank not in waiting}
        expired = [rank for rank, report in still.items() if stall_after and report.may_end
                   and min(report.seconds, report.python_seconds) >= stall_after]
        if expired:
            return [self._end(expired, still)]
        due = [rank for rank, report in still.items() if warn_after
               and report.seconds >= self._next.get(rank, warn_after)]
        for rank in due:  # a custom loop may take any time, so it is reported only once
            self._next[rank] = BACKOFF * still[rank].seconds if still[rank].in_loop else float("inf")
        return [Problem(None, rank, "" if rank > due[0] else self._more(due)) for rank in due[:MAX_WARNINGS]]

    def _end(self, expired: list[int], still: dict[int, Standstill]) -> Problem:
        # A step function without progress may wait in an uncounted collective for a rank that is elsewhere.
        rank = min(expired, key=lambda rank: (still[rank].phase in ("train", "validation"), rank))
        others = [other for other in still if other != rank]
        have = "have" if len(others) > 1 else "has"
        also = f"; {format_ranks(others)} {have} made no progress either" if others else ""
        return Problem(CauseKind.STALLED, rank, f"has made no progress for {still[rank].seconds:.0f} s:"
                       f" {still[rank].text}{also} (HVKERAS_STALL_SHUTDOWN sets the limit)")

    @staticmethod
    def _more(due: list[int]) -> str:
        more = due[MAX_WARNINGS:]
        return f"{len(more)} more ranks are not moving either: {format_numbers(more)}" if more else ""
