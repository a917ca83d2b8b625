"""Synchronization points, which ranks enter and leave together, and the ranks that wait in them.

In each of them, every rank that waits does so for every rank that is missing. With thousands of ranks there are
millions of such pairs, so they are never enumerated. A synchronization point stores the two groups, and is updated for
the ranks whose counts change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from hvkeras.control.messages import PlanDescription


class CheckTime:
    """The time of a check, shared by all changes since the previous check.

    Attributes:
        at: The time in seconds; infinite before the check.
    """

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = math.inf


class SyncPoint(Protocol):
    """A plan or an exchange."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def hint(self) -> str:
        """The alternative to a call that a rank may have made alone by mistake; else ""."""

    @property
    def since(self) -> CheckTime:
        """The first check at which the present ranks were missing while others waited."""

    @property
    def has_waiters(self) -> bool:
        """True if any rank waits for another."""

    @property
    def missing(self) -> Collection[int]:
        """The ranks for which others wait, if any do."""

    @property
    def waiting(self) -> Mapping[CheckTime, Collection[int]]:
        """The ranks that wait for the missing ones, by the first check that found them waiting."""

    def site(self, rank: int) -> str:
        """Return the user code from which a rank has entered it; "" if unknown."""


class PlanSyncPoint:
    """A plan, which ranks enter repeatedly; ranks with higher counts wait for those with lower counts.

    Args:
        number: Its index among the plans, in the order of their descriptions.

    Attributes:
        number: Its index among the plans, in the order of their descriptions.
        counts: How often each rank has entered it.
        since: The time since which the lowest count has been the same and lower than another.
        sites: The lines of user code that have entered it, by rank.
        before: The counts from before a rank forgot the plan.
        settled: The highest count, and the time since which all ranks have had it.
        is_being_forgotten: True if ranks have been asked to forget it.
        answers: The number of ranks that have answered this.
        warned_at: The time of the last warning about late ranks.
    """

    def __init__(self, number: int, plan: PlanDescription, now: CheckTime) -> None:
        self.number = number
        self.plan = plan
        self.counts: dict[int, int] = dict.fromkeys(plan["ranks"], 0)
        self.low = 0
        self.since = now
        self.sites: dict[int, str] = {}
        self.before: dict[int, int] = {}
        self.settled: tuple[int, float] = (-1, 0.0)
        self.is_being_forgotten = False
        self.answers = 0
        self.warned_at = -math.inf
        self._seen: dict[int, CheckTime] = {}  # the first check with a rank's count, unless counts were equal since
        self._by_count: dict[int, set[int]] = {0: set(self.counts)}
        self._reported: dict[int, int] = {}
        self._waiting: dict[CheckTime, list[int]] | None = None

    def report(self, ranks: Iterable[int], count: int) -> None:
        """Store the counts of ranks since they last forgot the plan, until `apply_reports`.

        Args:
            ranks: The ranks; those that do not participate in it are ignored.
            count: Their count.
        """
        if self.before:
            self._reported.update((rank, count + self.before.get(rank, 0)) for rank in ranks)
        else:
            self._reported.update(dict.fromkeys(ranks, count))

    def apply_reports(self, now: CheckTime) -> None:
        """Apply the ranks' reports, all at once for speed."""
        moves: dict[tuple[int, int], list[int]] = {}
        for rank, count in self._reported.items():
            if (before := self.counts.get(rank, count)) != count:
                moves.setdefault((before, count), []).append(rank)
        self._reported = {}
        was_equal, low, groups = not self.has_waiters, self.low, self._by_count
        for (old, new), ranks in moves.items():
            self.counts.update(dict.fromkeys(ranks, new))
            self._seen.update(dict.fromkeys(ranks, now))
            groups.setdefault(new, set()).update(ranks)
            groups[old].difference_update(ranks)
            if not groups[old]:
                del groups[old]
        if moves:
            self._waiting = None
            self.low = min(groups)
            if was_equal or self.low != low:
                self.since = now
            if not self.has_waiters:
                self._seen = {}

    @property
    def label(self) -> str:
        """Its name in messages."""
        return str(self.plan["label"])

    @property
    def hint(self) -> str:
        """The alternative to a call that one rank makes alone by mistake."""
        return str(self.plan["hint"])

    @property
    def high(self) -> int:
        """The highest count."""
        return max(self._by_count)

    @property
    def has_waiters(self) -> bool:
        """True if the counts differ."""
        return len(self._by_count) > 1

    @property
    def missing(self) -> set[int]:
        """The ranks with the lowest count."""
        return self._by_count[self.low]

    @property
    def waiting(self) -> dict[CheckTime, list[int]]:
        """The ranks with higher counts, by the first check that found their count: progress starts another wait."""
        if self._waiting is None:
            self._waiting = {}
            for count, ranks in self._by_count.items():
                for rank in ranks if count > self.low else ():
                    self._waiting.setdefault(self._seen.get(rank, self.since), []).append(rank)
        return self._waiting

    def site(self, rank: int) -> str:
        """Return the user code from which a rank has entered it; "" if unknown."""
        return self.sites.get(rank, "")

    def finish_forgetting(self) -> bool:
        """Return whether all ranks have forgotten it, once all have answered; if not, they may be asked again."""
        self.is_being_forgotten, self.answers, self.settled = False, 0, (-1, 0.0)
        high = self.high
        return all(self.before.get(rank) == high for rank in self.counts)


class ExchangeSyncPoint:
    """An exchange over the control channel, which all ranks must enter.

    Args:
        ranks: All ranks.

    Attributes:
        hint: Always "".
        since: The time at which the first rank entered it.
        missing: The ranks that have not entered it.
    """

    def __init__(self, name: str, ranks: Iterable[int], now: CheckTime) -> None:
        self.label = f'the exchange "{name}"'
        self.hint = ""
        self.since = now
        self.missing = set(ranks)
        self._waiters: dict[int, CheckTime] = {}  # ranks that have entered it and do nothing else

    def set_waiting(self, ranks: Iterable[int], do_wait: bool, now: CheckTime) -> None:
        """Record whether ranks wait in it.

        Args:
            do_wait: True if they wait.
        """
        for rank in ranks:
            if do_wait:
                self._waiters.setdefault(rank, now)
            else:
                self._waiters.pop(rank, None)

    @property
    def has_waiters(self) -> bool:
        """True if any rank waits for another."""
        return bool(self._waiters and self.missing)

    @property
    def waiting(self) -> dict[CheckTime, list[int]]:
        """The ranks that wait, by the first check that found them waiting."""
        found: dict[CheckTime, list[int]] = {}
        for rank, moment in self._waiters.items():
            found.setdefault(moment, []).append(rank)
        return found

    def site(self, _rank: int) -> str:
        """Return ""."""
        return ""
