"""The server side of `hvkeras.collectives.join`: which ranks must participate in the collectives of others.

A mismatch is resolved in three steps, strictly in sequence. First, all ranks report the calls of their plans. Second,
the ranks that wait in one of the plans are notified that it is refused, and confirm this. Third, all other ranks
participate in the plan so that it completes, and the ranks that waited in it raise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from hvkeras.control.deadlocks import Problem, Waits
from hvkeras.control.messages import CallDescriptions, Message, Participate, PlanRefused

REFUSED_WITHIN = 20.0  # seconds for a refusal to complete
Request = tuple[int, Message]


@dataclass
class Refusal:
    """Plans that do not match.

    Attributes:
        since: When the mismatch was found, in seconds.
        unconfirmed: Pairs of a rank that waits in one of the plans and the plan's key, where the rank has not yet
            confirmed the refusal; None before the ranks are notified.
        counts: The count of each plan when the ranks were notified; later entries are not refused.
        has_asked: True if the other ranks have been asked to participate.
    """

    keys: frozenset[str]
    text: str
    since: float
    unconfirmed: set[tuple[int, str]] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    has_asked: bool = False

    def outstanding(self, waits: Waits, rank: int) -> list[str]:
        """Return the plans in which a rank will be asked to participate on behalf of others."""
        return [key for key, count in self.counts.items() if waits.sync_point(key).counts.get(rank, count) < count]


class Participation:
    """The joined ranks and the refused plans.

    Attributes:
        joined: The joined ranks, in the order in which they joined.
    """

    def __init__(self) -> None:
        self.joined: list[int] = []
        # the count of a plan up to which joined ranks have been asked to participate
        self._requested_for_joined: dict[str, int] = {}
        self._refusals: list[Refusal] = []
        self._calls: dict[str, CallDescriptions] = {}
        self._asked: dict[str, dict[int, int]] = {}  # the same for each rank

    @property
    def is_busy(self) -> bool:
        """True if ranks must report immediately which plans they enter, and their calls."""
        return bool(self.joined or self._refusals)

    def join(self, rank: int) -> None:
        """Record that a rank has joined."""
        self.joined.append(rank)
        self._requested_for_joined.clear()

    def add_calls(self, calls: Mapping[str, CallDescriptions]) -> None:
        """Record the calls of plans, by plan key."""
        self._calls.update(calls)

    def forget(self, keys: Collection[str]) -> None:
        """Remove plans that all ranks have forgotten."""
        for key in keys:
            for table in (self._calls, self._asked, self._requested_for_joined):
                table.pop(key, None)

    def refuse(self, finding: Problem, now: float) -> bool:
        """Start to refuse plans that do not match, unless their refusal has already started.

        Args:
            now: The time, in seconds.

        Returns:
            False if the refusal takes too long, as some rank may be unable to participate; else True.
        """
        keys = frozenset(finding.keys)
        begun = next((refusal for refusal in self._refusals if refusal.keys & keys), None)
        if begun is None:
            self._refusals.append(Refusal(keys, finding.text, now))
        return begun is None or now - begun.since < REFUSED_WITHIN

    def confirm(self, rank: int, key: str) -> str:
        """Record a rank's confirmation of a plan's refusal.

        Returns:
            The difference between the plans.
        """
        refusal = next(refusal for refusal in self._refusals if key in refusal.keys)
        if refusal.unconfirmed is not None:
            refusal.unconfirmed.discard((rank, key))
        return refusal.text

    def requests(self, waits: Waits) -> Iterator[Request]:
        """Yield the messages that ranks must receive now.

        Args:
            waits: The counts of entered plans.
        """
        for key in waits.unequal() if self.joined else ():
            count = waits.sync_point(key).high
            if key in self._calls and self._requested_for_joined.get(key, 0) < count:
                self._requested_for_joined[key] = count
                for rank in self.joined:
                    yield from self._participation(waits, rank, key, count, False)
        for refusal in list(self._refusals):
            yield from self._refused(refusal, waits)

    def _refused(self, refusal: Refusal, waits: Waits) -> Iterator[Request]:
        if not all(key in self._calls for key in refusal.keys):
            return
        if refusal.unconfirmed is None:
            refusal.unconfirmed = set()
            refusal.counts = {key: waits.sync_point(key).high for key in refusal.keys}
            for key in sorted(refusal.keys):
                counts, low = waits.counts(key), waits.sync_point(key).low
                for rank in (rank for rank, count in counts.items() if count > low):
                    refusal.unconfirmed.add((rank, key))
                    yield rank, PlanRefused(key, refusal.text, refusal.outstanding(waits, rank))
        if refusal.unconfirmed:
            return
        if all(waits.sync_point(key).low >= count for key, count in refusal.counts.items()):
            self._refusals.remove(refusal)
        elif not refusal.has_asked:
            refusal.has_asked = True
            for key, count in refusal.counts.items():
                for rank in waits.counts(key):
                    yield from self._participation(waits, rank, key, count, True)

    def _participation(self, waits: Waits, rank: int, key: str, count: int, refused: bool) -> Iterator[Request]:
        asked = self._asked.setdefault(key, {})
        times = count - max(waits.sync_point(key).counts.get(rank, count), asked.get(rank, 0))
        if times > 0 and key in self._calls:
            asked[rank] = count
            yield rank, Participate(key, waits.plan(key), self._calls[key], times, refused)
