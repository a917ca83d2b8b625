"""Heartbeats of a rank: changes of its counts of entered plans, and whether it makes progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvkeras.control import activity, location
from hvkeras.control.messages import (
    CallDescriptions,
    Heartbeat,
    Message,
    PlanDescription,
    Plans,
    PlansForgotten,
    Standstill,
)

GRADIENTS = "gradients"  # the operation of plans that reduce gradients; their counts are training steps
_NOTHING_NEW = Heartbeat()
CHECK_INTERVAL = 0.4  # minimum seconds between two checks for progress


class PlanLike(Protocol):
    """A plan; see `hvkeras.job.plans`."""

    @property
    def operation(self) -> str:
        """Its operation."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    def describe(self) -> PlanDescription:
        """Return the plan as plain data."""


class Entries(Protocol):
    """Counts of this rank's entries into each plan; see `hvkeras.job.plans`."""

    def snapshot(self) -> Mapping[str, tuple[int, PlanLike]]:
        """Return every count."""

    def site(self, key: str) -> str:
        """Return the line of user code that last entered a plan."""

    def calls(self) -> Mapping[str, CallDescriptions]:
        """Return the calls that plans consist of."""

    def forget(self, counts: Mapping[str, int]) -> list[str]:
        """Remove plans that this rank has entered exactly as often as given; return their keys."""

    def set_outstanding(self, keys: Sequence[str]) -> None:
        """Set the plans in which this rank participates for others before it may enter them itself."""

    def can_raise(self, key: str) -> bool:
        """Return whether this rank raises everywhere it enters a plan if that plan is refused."""


class Watch:
    """Detector of missing progress: whether this rank enters collectives or advances in Keras's loops.

    Args:
        *limits: Times without progress after which the server acts, in seconds; 0 is no limit.
        on_move: Called when the rank resumes progress after a report, with the seconds without any.

    Attributes:
        is_reported: True if the rank's lack of progress has been reported.
    """

    def __init__(self, *limits: float, on_move: Callable[[float], None] | None = None) -> None:
        self._shortest_limit = min((limit for limit in limits if limit), default=0.0)
        self._moves = -1
        self._batches: int | None = None
        self._instructions: Any = None
        self._checked_at = self._progressed_at = self._instructions_since = 0.0
        self._outside = False  # its last progress was in a custom loop
        self._settling = False  # just after a Keras loop, whose last collectives may be reported later
        self._report: Standstill | None = None
        self.is_reported: bool = False
        self._on_move = on_move

    def check(self, now: float, entered: bool, steps: Callable[[], str] = str) -> Standstill | None:
        """Check this rank.

        Args:
            now: The time, in seconds.
            entered: True if it has entered a collective since the last check.
            steps: Describes what a custom training loop has done; "" if nothing.

        Returns:
            The report for the server: seconds without progress, location, and whether that may end the job. None for a
            rank that makes progress.
        """
        if not self._shortest_limit or (now - self._checked_at < CHECK_INTERVAL and not entered):
            return self._report
        self._checked_at = now
        if self._has_progressed(entered):
            if self.is_reported and self._on_move is not None:
                self._on_move(now - self._progressed_at)
            self.is_reported = False
            self._progressed_at = self._instructions_since = now
        instructions = activity.instructions()
        if instructions != self._instructions:
            self._instructions, self._instructions_since = instructions, now
        still = now - self._progressed_at
        self._report = None
        if still >= self._shortest_limit:
            doing, text = location.here(steps())
            if doing.within or self._outside:
                self._report = Standstill(still, now - self._instructions_since, text, doing.phase, doing.within,
                                          doing.may_end)
        return self._report

    def still(self, now: float) -> float:
        """Return the seconds since this rank last made progress."""
        return now - self._progressed_at

    def restart(self, now: float) -> None:
        """Restart the measurement, since the whole process was stopped."""
        self._progressed_at = self._instructions_since = now

    def _has_progressed(self, entered: bool) -> bool:
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


class Heartbeats:
    """Creator and sender of heartbeats.

    Args:
        send: Sends a message to the server.
        waiting_in: Returns the exchanges in which this rank waits.
        is_waiting: Returns whether any thread of this rank waits in an exchange, so that it is not stalled.

    Attributes:
        entries: The counts of entered plans; None before there are any.
        watch: Measures progress; None if that is not needed.
        some_joined: True if the server must receive the calls of plans, and without delay.
    """

    def __init__(self, send: Callable[[Message], None], waiting_in: Callable[[], list[str]],
                 is_waiting: Callable[[], bool]) -> None:
        self.entries: Entries | None = None
        self.watch: Watch | None = None
        self.some_joined: bool = False
        self._send = send
        self._waiting_in = waiting_in
        self._is_waiting = is_waiting
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}  # as last sent to the server
        self._sites: dict[str, str] = {}
        self._called: set[str] = set()

    def send(self, only_news: bool = False) -> None:
        """Send a heartbeat.

        Args:
            only_news: True to send none without changes.
        """
        with self._lock:  # so that counts are sent in the order in which they were read
            beat = self._next()
            if not (only_news and beat == _NOTHING_NEW):
                self._send(beat)

    def forget(self, counts: Mapping[str, int]) -> None:
        """Forget plans that no rank has entered lately, unless this rank has entered them again in the meantime."""
        with self._lock:  # heartbeats before the answer continue the old counts; those after it start from zero
            keys = [] if self.entries is None else self.entries.forget(counts)
            for key in keys:
                self._counts.pop(key, None)
                self._sites.pop(key, None)
                self._called.discard(key)
            self._send(PlansForgotten(counts, keys))

    def describe(self, keys: Sequence[str]) -> None:
        """Send the descriptions of plans, unless this rank has forgotten them."""
        known = {} if self.entries is None else self.entries.snapshot()
        self._send(Plans({key: known[key][1].describe() for key in keys if key in known}))

    def steps(self) -> str:
        """Return a description of a custom training loop's steps; "" if it has not exchanged gradients yet."""
        steps = {} if self.entries is None else self.entries.snapshot()
        count, label = max(((count, plan.label) for count, plan in steps.values()
                            if count and plan.operation == GRADIENTS), default=(0, ""))
        return f", {label} exchanged {count} time{'s' * (count > 1)}" if count else ""

    def _next(self) -> Heartbeat:
        counts: dict[str, int] = {}
        sites: dict[str, str] = {}
        calls: dict[str, CallDescriptions] = {}
        entries = self.entries
        if entries is not None:
            changed = {key: seen for key, seen in entries.snapshot().items() if self._counts.get(key) != seen[0]}
            counts = {key: seen[0] for key, seen in changed.items()}
            self._counts.update(counts)
            entered_at = {key: entries.site(key) for key in changed}
            sites = {key: site for key, site in entered_at.items() if self._sites.get(key) != site}
            self._sites.update(sites)
            if self.some_joined:
                calls = {key: made for key, made in entries.calls().items() if key not in self._called}
                self._called.update(calls)
        standstill = None
        if self.watch is not None:
            found = self.watch.check(time.monotonic(), bool(counts), self.steps)
            standstill = None if self._is_waiting() else found
        return Heartbeat(counts, sites, calls, tuple(self._waiting_in()), standstill)
