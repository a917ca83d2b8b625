"""A rank's own watch: for how long it has not moved, which the control server judges (`hvkeras.control.stalls`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvkeras.progress import activity, location

if TYPE_CHECKING:
    from hvkeras.plans.entry_counts import EntryCounts

OFTEN = 0.4  # seconds between two looks, at least


class Watch:
    """Looks whether this rank gets on: whether it enters collectives, and whether Keras's loops do.

    Args:
        *limits: The seconds without a movement that matter to the server; 0 does not.

    Attributes:
        is_told: Whether it was said that the rank does not move.
        on_move: Called with the seconds that it stood still, when it moves after that.
    """

    def __init__(self, *limits: float) -> None:
        self._notice = min((limit for limit in limits if limit), default=0.0)
        self._moves = -1
        self._batches: int | None = None
        self._standing: Any = None
        self._looked = self._moved = self._stood = 0.0
        self._outside = False  # it moved last in a loop of the user's own
        self._settling = False  # it has just left a loop of Keras's, whose last collectives are still to be heard of
        self._report: dict[str, Any] | None = None
        self.is_told = False  # that it does not move
        self.on_move: Callable[[float], None] | None = None

    def look(self, now: float, entered: bool, entries: EntryCounts | None) -> dict[str, Any] | None:
        """Looks at this rank.

        Args:
            now: The time, in seconds.
            entered: Whether it has entered a collective since the last look.
            entries: The counts of entered collectives.

        Returns:
            What the server shall know of a rank that does not move: for how many seconds, where, and whether that may
            end the job; None of one that moves.
        """
        if not self._notice or (now - self._looked < OFTEN and not entered):
            return self._report
        self._looked = now
        if self._has_moved(entered):
            if self.is_told and self.on_move is not None:
                self.on_move(now - self._moved)
            self.is_told = False
            self._moved = self._stood = now
        standing = activity.standing()
        if standing != self._standing:
            self._standing, self._stood = standing, now
        still = now - self._moved
        self._report = None
        if still >= self._notice:
            doing, text = location.here(steps_of(entries))
            if doing.within or self._outside:
                self._report = {"for": still, "stood": now - self._stood, "text": text, "phase": doing.phase,
                                "within": doing.within, "may_end": doing.may_end}
        return self._report

    def still(self, now: float) -> float:
        """For how many seconds this rank has not moved.

        Args:
            now: The time, in seconds.
        """
        return now - self._moved

    def forgive(self, now: float) -> None:
        """Begins anew, since the whole process was stopped.

        Args:
            now: The time, in seconds.
        """
        self._moved = self._stood = now

    def _has_moved(self, entered: bool) -> bool:
        moves = activity.moves()
        if moves != self._moves:
            self._moves, self._outside, self._settling, self._batches = moves, False, True, None
            return True
        if entered:
            self._outside, self._settling, self._batches = not self._settling, False, None
            return True
        batches = activity.batches()  # reading it takes longer, so only when nothing else has moved
        before, self._batches = self._batches, batches
        return before not in (None, batches)


def steps_of(entries: EntryCounts | None) -> str:
    """What a loop of one's own has done, in words; "" if it has not yet exchanged gradients.

    Args:
        entries: The counts of entered collectives.
    """
    steps = {} if entries is None else entries.snapshot()
    count, label = max(((count, plan.label) for count, plan in steps.values()
                        if count and plan.operation.startswith("gradients")), default=(0, ""))
    return f", {label} exchanged {count} time{'s' * (count > 1)}" if count else ""
