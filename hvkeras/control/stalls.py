"""Ranks that make no progress though they wait for no other rank, due to a dead data source or a hung callback.

Each rank measures how long it has made no progress, and reports that (`Watch`); the control server evaluates it
(`Stalls`). `hvkeras.control.waits` handles ranks that wait for others or that others wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hvkeras.control.cause import CauseKind
from hvkeras.control.messages import Standstill
from hvkeras.control.waits import Finding
from hvkeras.progress import activity, location

CHECK_INTERVAL = 0.4  # minimum seconds between two checks of a rank by itself
MAX_WARNINGS = 8  # how many ranks are asked for their location at the same time
BACKOFF = 2.0  # the next report of the same stall is due after this multiple of its duration so far


class Watch:
    """Checks whether this rank makes progress: whether it enters collectives or advances in Keras's loops.

    Args:
        *limits: Times without progress after which the server acts, in seconds; 0 is no limit.
        on_move: Called when the rank makes progress after that was reported, with the seconds without any.

    Attributes:
        is_reported: Whether the rank's lack of progress has been reported.
    """

    def __init__(self, *limits: float, on_move: Callable[[float], None] | None = None) -> None:
        self._notice = min((limit for limit in limits if limit), default=0.0)
        self._moves = -1
        self._batches: int | None = None
        self._standing: Any = None
        self._checked_at = self._moved_at = self._standing_since = 0.0
        self._outside = False  # its last progress was in a custom loop
        self._settling = False  # it has just left a Keras loop whose last collectives may be reported later
        self._report: Standstill | None = None
        self.is_reported: bool = False
        self._on_move = on_move

    def check(self, now: float, entered: bool, steps: Callable[[], str] = str) -> Standstill | None:
        """Checks this rank.

        Args:
            now: The time, in seconds.
            entered: Whether it has entered a collective since the last check.
            steps: Describes what a custom training loop has done; "" if nothing.

        Returns:
            What the server must know about a rank without progress: for how many seconds, where, and whether that may
            end the job; None for a rank that makes progress.
        """
        if not self._notice or (now - self._checked_at < CHECK_INTERVAL and not entered):
            return self._report
        self._checked_at = now
        if self._has_moved(entered):
            if self.is_reported and self._on_move is not None:
                self._on_move(now - self._moved_at)
            self.is_reported = False
            self._moved_at = self._standing_since = now
        standing = activity.standing()
        if standing != self._standing:
            self._standing, self._standing_since = standing, now
        still = now - self._moved_at
        self._report = None
        if still >= self._notice:
            doing, text = location.here(steps())
            if doing.within or self._outside:
                self._report = Standstill(still, now - self._standing_since, text, doing.phase, doing.within,
                                          doing.may_end)
        return self._report

    def still(self, now: float) -> float:
        """Seconds since this rank last made progress.

        Args:
            now: The time, in seconds.
        """
        return now - self._moved_at

    def forgive(self, now: float) -> None:
        """Restarts the measurement, since the whole process was stopped.

        Args:
            now: The time, in seconds.
        """
        self._moved_at = self._standing_since = now

    def _has_moved(self, entered: bool) -> bool:
        moves = activity.moves()
        if moves != self._moves:
            self._moves, self._outside, self._settling, self._batches = moves, False, True, None
            return True
        if entered:
            self._outside, self._settling, self._batches = not self._settling, False, None
            return True
        batches = activity.batches()  # slow to read, so only if nothing else has changed
        before, self._batches = self._batches, batches
        return before not in (None, batches)


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

    def check(self, waiting: Collection[int]) -> list[Finding]:
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
        return [Finding(None, rank, self._more(due)) for rank in due[:MAX_WARNINGS]]

    def _end(self, over: list[int], still: dict[int, Standstill]) -> Finding:
        # A step function without progress may be in a collective that nobody counts, waiting for a rank elsewhere.
        rank = min(over, key=lambda rank: (still[rank].phase in ("train", "validation"), rank))
        others = [str(other) for other in still if other != rank]
        names = f"ranks {', '.join(others)} have" if len(others) > 1 else f"rank {''.join(others)} has"
        also = f"; {names} not moved either" if others else ""
        return Finding(CauseKind.STALLED, rank, f"has not moved for {still[rank].seconds:.0f} s:"
                       f" {still[rank].text}{also} (HVKERAS_STALL_SHUTDOWN sets the limit)")

    @staticmethod
    def _more(due: list[int]) -> str:
        more = due[MAX_WARNINGS:]
        return f"{len(more)} more ranks are not moving either: {', '.join(map(str, more))}" if more else ""
