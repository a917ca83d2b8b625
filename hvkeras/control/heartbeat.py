"""The heartbeats of a rank: a sign of life, with what has changed about the plans that it has entered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hvkeras.control.messages import CallDescriptions, Heartbeat, Message, PlanDescription, PlansForgotten
from hvkeras.control.stalls import Watch


class PlanLike(Protocol):
    """A plan; see `hvkeras.plans.plan`."""

    @property
    def operation(self) -> str:
        """What is done, with qualifiers."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    def describe(self) -> PlanDescription:
        """The plan as plain data."""


class Entries(Protocol):
    """How often this rank has entered each plan; see `hvkeras.plans.entry_counts`."""

    def snapshot(self) -> Mapping[str, tuple[int, PlanLike]]:
        """Reads every count."""

    def site(self, key: str) -> str:
        """Where the user's code last entered a plan."""

    def calls(self) -> Mapping[str, CallDescriptions]:
        """The calls that plans consist of."""

    def forget(self, counts: Mapping[str, int]) -> list[str]:
        """Forgets plans that this rank has entered exactly as often as given."""

    def set_owed(self, keys: Sequence[str]) -> None:
        """Records in which plans this rank participates for others before it may enter them itself."""

    def can_raise(self, key: str) -> bool:
        """Whether this rank raises everywhere it enters a plan if that plan is refused."""


class Heartbeats:
    """Makes and sends heartbeats.

    Args:
        send: Sends a message to the server.
        waiting_in: Returns the exchanges in which this rank waits.
        is_waiting: Whether any thread of this rank waits in an exchange, so that it makes no progress for good reason.

    Attributes:
        entries: The counts of entered plans; None before there are any.
        watch: Measures progress; None if nobody wants to know.
        some_joined: Whether the server must learn which calls plans consist of, and without delay.
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
        self._counts: dict[str, int] = {}  # as the server knows them
        self._sites: dict[str, str] = {}
        self._called: set[str] = set()

    def send(self) -> None:
        """Sends a heartbeat."""
        with self._lock:  # so that counts are sent in the order in which they were read
            self._send(self._next())

    def forget(self, counts: Mapping[str, int]) -> None:
        """Forgets plans that no rank has entered lately, unless this rank has entered them again in the meantime."""
        with self._lock:  # heartbeats before the answer continue the old counts; those after it start from zero
            keys = [] if self.entries is None else self.entries.forget(counts)
            for key in keys:
                self._counts.pop(key, None)
                self._sites.pop(key, None)
                self._called.discard(key)
            self._send(PlansForgotten(counts, keys))

    def steps(self) -> str:
        """Describes what a custom training loop has done; "" if it has not exchanged gradients yet."""
        steps = {} if self.entries is None else self.entries.snapshot()
        count, label = max(((count, plan.label) for count, plan in steps.values()
                            if count and plan.operation.startswith("gradients")), default=(0, ""))
        return f", {label} exchanged {count} time{'s' * (count > 1)}" if count else ""

    def _next(self) -> Heartbeat:
        plans: dict[str, PlanDescription] = {}
        counts: dict[str, int] = {}
        sites: dict[str, str] = {}
        calls: dict[str, CallDescriptions] = {}
        entries = self.entries
        if entries is not None:
            changed = {key: seen for key, seen in entries.snapshot().items() if self._counts.get(key) != seen[0]}
            plans = {key: seen[1].describe() for key, seen in changed.items() if key not in self._counts}
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
        return Heartbeat(plans, counts, sites, calls, self._waiting_in(), standstill)
