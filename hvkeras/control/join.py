"""The server side of `hvkeras.collectives.join`: which ranks must participate in the collectives of others.

A mismatch is resolved in three steps, strictly one after the other. First, all ranks report what their plans consist
of. Second, the ranks that wait in one of the plans learn that it is refused, and confirm this. Third, all other
ranks participate in the plan so that it completes, and the ranks that waited in it raise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from hvkeras.control.deadlocks import Finding, Waits
from hvkeras.control.messages import CallDescriptions, Message, Participate, PlanRefused

REFUSED_WITHIN = 20.0  # seconds for a refusal to complete
Request = tuple[int, Message]


@dataclass
class Refusal:
    """Plans that do not match.

    Attributes:
        keys: Their keys.
        text: What differs.
        since: When the mismatch was found, in seconds.
        unconfirmed: Pairs of a rank that waits in one of the plans and the plan's key, where the rank has not yet
            confirmed the refusal; None before the ranks are notified.
        counts: How often each plan had been entered when the ranks were notified; later entries are not refused.
    """

    keys: frozenset[str]
    text: str
    since: float
    unconfirmed: set[tuple[int, str]] | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def outstanding(self, waits: Waits, rank: int) -> list[str]:
        """The plans in which a rank will be asked to participate on behalf of others.

        Args:
            waits: The counts of entered plans.
            rank: The rank.
        """
        return [key for key, count in self.counts.items() if waits.counts(key).get(rank, count) < count]


class Participation:
    """The joined ranks and the refused plans."""

    def __init__(self) -> None:
        self.joined: list[int] = []
        self._refusals: list[Refusal] = []
        self._calls: dict[str, CallDescriptions] = {}
        self._asked: dict[tuple[int, str], int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether ranks must report immediately which plans they enter and what those consist of."""
        return bool(self.joined or self._refusals)

    def learn(self, calls: Mapping[str, CallDescriptions]) -> None:
        """Records which calls plans consist of.

        Args:
            calls: The calls, by plan key.
        """
        self._calls.update(calls)

    def forget(self, keys: Collection[str]) -> None:
        """Forgets plans that no rank remembers any more.

        Args:
            keys: Their keys.
        """
        for key in keys:
            self._calls.pop(key, None)
        self._asked = {asked: count for asked, count in self._asked.items() if asked[1] not in keys}

    def refuse(self, finding: Finding, now: float) -> bool:
        """Starts to refuse plans that do not match, unless their refusal has already started.

        Args:
            finding: The mismatch.
            now: The time, in seconds.

        Returns:
            Whether the refusal may still complete: False once it takes too long, as some rank may be unable to
            participate.
        """
        keys = frozenset(finding.keys)
        begun = next((refusal for refusal in self._refusals if refusal.keys & keys), None)
        if begun is None:
            self._refusals.append(Refusal(keys, finding.text, now))
        return begun is None or now - begun.since < REFUSED_WITHIN

    def confirm(self, rank: int, key: str) -> str:
        """Records that a rank knows of a plan's refusal.

        Args:
            rank: The rank.
            key: The plan's key.

        Returns:
            What differs.
        """
        refusal = next(refusal for refusal in self._refusals if key in refusal.keys)
        if refusal.unconfirmed is not None:
            refusal.unconfirmed.discard((rank, key))
        return refusal.text

    def requests(self, waits: Waits) -> Iterator[Request]:
        """Finds the messages that ranks must receive now.

        Args:
            waits: The counts of entered plans.

        Yields:
            The rank and the message for it.
        """
        for rank in self.joined:
            for key in waits.plans_of(rank):
                yield from self._participation(waits, rank, key, max(waits.counts(key).values()), False)
        for refusal in list(self._refusals):
            yield from self._refused(refusal, waits)

    def _refused(self, refusal: Refusal, waits: Waits) -> Iterator[Request]:
        if not all(key in self._calls for key in refusal.keys):
            return
        if refusal.unconfirmed is None:
            refusal.unconfirmed = set()
            refusal.counts = {key: max(waits.counts(key).values()) for key in refusal.keys}
            for key in sorted(refusal.keys):
                counts = waits.counts(key)
                for rank in (rank for rank, count in counts.items() if count > min(counts.values())):
                    refusal.unconfirmed.add((rank, key))
                    yield rank, PlanRefused(key, refusal.text, refusal.outstanding(waits, rank))
        if refusal.unconfirmed:
            return
        if all(min(waits.counts(key).values()) >= count for key, count in refusal.counts.items()):
            self._refusals.remove(refusal)
            return
        for key, count in refusal.counts.items():
            for rank in waits.counts(key):
                yield from self._participation(waits, rank, key, count, True)

    def _participation(self, waits: Waits, rank: int, key: str, count: int, refused: bool) -> Iterator[Request]:
        times = count - max(waits.counts(key)[rank], self._asked.get((rank, key), 0))
        if times > 0 and key in self._calls:
            self._asked[rank, key] = count
            yield rank, Participate(key, waits.plan(key), self._calls[key], times, refused)
