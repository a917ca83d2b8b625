"""Measures how long this rank has made no progress; the control server evaluates that (`hvkeras.control.stalls`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvkeras.progress import activity, location

if TYPE_CHECKING:
    from hvkeras.plans.entry_counts import EntryCounts

CHECK_INTERVAL = 0.4  # minimum seconds between two checks


class Watch:
    """Checks whether this rank makes progress: whether it enters collectives or advances in Keras's loops.

    Args:
        *limits: Times without progress after which the server acts, in seconds; 0 is no limit.

    Attributes:
        is_reported: Whether the rank's lack of progress has been reported.
        on_move: Called when the rank makes progress after that, with the seconds for which it had made none.
    """

    def __init__(self, *limits: float) -> None:
        self._notice = min((limit for limit in limits if limit), default=0.0)
        self._moves = -1
        self._batches: int | None = None
        self._standing: Any = None
        self._checked_at = self._moved_at = self._standing_since = 0.0
        self._outside = False  # its last progress was in a custom loop
        self._settling = False  # it has just left a Keras loop whose last collectives may be reported later
        self._report: dict[str, Any] | None = None
        self.is_reported: bool = False
        self.on_move: Callable[[float], None] | None = None

    def check(self, now: float, entered: bool, entries: EntryCounts | None) -> dict[str, Any] | None:
        """Checks this rank.

        Args:
            now: The time, in seconds.
            entered: Whether it has entered a collective since the last check.
            entries: The counts of entered collectives.

        Returns:
            What the server must know about a rank without progress: for how many seconds, where, and whether that may
            end the job; None for a rank that makes progress.
        """
        if not self._notice or (now - self._checked_at < CHECK_INTERVAL and not entered):
            return self._report
        self._checked_at = now
        if self._has_moved(entered):
            if self.is_reported and self.on_move is not None:
                self.on_move(now - self._moved_at)
            self.is_reported = False
            self._moved_at = self._standing_since = now
        standing = activity.standing()
        if standing != self._standing:
            self._standing, self._standing_since = standing, now
        still = now - self._moved_at
        self._report = None
        if still >= self._notice:
            doing, text = location.here(steps_of(entries))
            if doing.within or self._outside:
                self._report = {"for": still, "stood": now - self._standing_since, "text": text, "phase": doing.phase,
                                "within": doing.within, "may_end": doing.may_end}
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


def steps_of(entries: EntryCounts | None) -> str:
    """Describes what a custom training loop has done; "" if it has not exchanged gradients yet.

    Args:
        entries: The counts of entered collectives.
    """
    steps = {} if entries is None else entries.snapshot()
    count, label = max(((count, plan.label) for count, plan in steps.values()
                        if count and plan.operation.startswith("gradients")), default=(0, ""))
    return f", {label} exchanged {count} time{'s' * (count > 1)}" if count else ""
