"""Detects deadlocks and stalls from the ranks' counts of entered plans.

A rank enters a plan just before the collective runs (`hvkeras.plans`), and leaves it only when all other ranks
have entered it equally often. A rank with a higher count of a plan than another rank is therefore waiting for that
rank. So is a rank that waits in an exchange over this channel. Ranks that wait for each other, two of them or several
in a circle, would wait forever: that is a mismatch. A rank that waits for one that has left is stuck as well. A rank
that waits for one that is merely late is a stall, which first leads to a warning and then to the end of the job; in an
exchange, the rank sees to that by itself.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hvkeras.control.cause import CauseKind
from hvkeras.control.messages import PlanDescription
from hvkeras.host.console import in_words

MAX_PLANS = 256  # how many plans are remembered even if no rank enters them
IDLE = 2.0  # seconds after which a plan that all ranks have entered equally often may be forgotten
PATIENCE = 3  # how many times as long a mismatch waits if some of its ranks have not arrived yet

_UNLIKE_MODELS = (" (the models themselves differ: build the same model on every rank; a tuner must give all ranks the"
                  " same trial)")


@dataclass(frozen=True)
class Wait:
    """One rank's wait for another in one plan; with the waiter's count, so that progress makes it a different wait."""

    waiter: int
    missing: int
    key: str
    count: int


@dataclass(frozen=True)
class Finding:
    """A problem.

    Attributes:
        kind: What it ends the job for; None for a warning.
        rank: The rank at fault; None for none.
        text: A description.
        keys: The plans of a mismatch in which all of their ranks wait, so that all can raise.
    """

    kind: CauseKind | None
    rank: int | None
    text: str
    keys: tuple[str, ...] = ()


@dataclass
class Exchange:
    """An exchange over the control channel that some ranks have come to, and all must: who, and who waits in it."""

    there: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)


class Waits:
    """Stores the counts, and finds waits that have lasted too long.

    Args:
        size: The number of ranks in the job.
        mismatch_after: Seconds for which two ranks must wait for each other to count as a mismatch.
        warn_after: Seconds of waiting until a warning; repeated at that interval.
        stall_after: Seconds of waiting until the job ends; 0 for never.
    """

    def __init__(self, size: int, mismatch_after: float, warn_after: float, stall_after: float) -> None:
        self._ranks = range(size)
        self._exchanges: dict[str, Exchange] = {}
        self.limits = (mismatch_after, warn_after, stall_after)
        self._counts: dict[int, dict[str, int]] = {}
        self._sites: dict[int, dict[str, str]] = {}
        self._plans: dict[str, PlanDescription] = {}
        self._since: dict[Wait, float] = {}
        self._warned: dict[Wait, float] = {}
        self._left: set[int] = set()
        self._settled: dict[str, tuple[int, float]] = {}  # plans in which no rank waits: their count, and since when
        self._forgetting: set[str] = set()
        self._answers: dict[str, int] = {}  # number of answers from ranks that were asked to forget a plan
        self._before: dict[int, dict[str, int]] = {}  # a rank's counts of plans from before it forgot them

    def describe(self, key: str, plan: PlanDescription) -> None:
        """Records what a plan consists of."""
        self._plans[key] = plan

    def update(self, rank: int, counts: Mapping[str, int],
               sites: Mapping[str, str] | None = None) -> None:
        """Records a rank's counts, and where its user code enters plans; plans that are not given keep theirs."""
        before = self._before.get(rank, {})
        self._counts.setdefault(rank, {}).update({key: count + before.get(key, 0) for key, count in counts.items()})
        self._sites.setdefault(rank, {}).update(sites or {})

    def come(self, rank: int, exchange: str) -> None:
        """Records that a rank has come to an exchange."""
        self._exchanges.setdefault(exchange, Exchange()).there.add(rank)

    def set_waiting(self, rank: int, names: Collection[str]) -> None:
        """Records the exchanges in which a rank waits, so that it does nothing else."""
        for name, exchange in self._exchanges.items():
            (exchange.waiting.add if name in names else exchange.waiting.discard)(rank)

    def finish(self, exchange: str) -> None:
        """Records that all ranks have come to an exchange."""
        self._exchanges.pop(exchange, None)

    def set_left(self, rank: int, left: bool) -> None:
        """Records that a rank has left the job normally, or has come back to it."""
        (self._left.add if left else self._left.discard)(rank)

    def plan(self, key: str) -> PlanDescription:
        """What a plan consists of."""
        return self._plans[key]

    def counts(self, key: str) -> dict[int, int]:
        """How often each rank of a plan has entered it."""
        return {rank: self._counts.get(rank, {}).get(key, 0) for rank in self._plans[key]["ranks"]}

    def plans_of(self, rank: int) -> list[str]:
        """The keys of the plans in which a rank participates."""
        return [key for key, plan in self._plans.items() if rank in plan["ranks"]]

    def to_forget(self, now: float) -> dict[int, dict[str, int]]:
        """The plans that ranks may forget: if many are known, those that no rank waits in or has entered lately.

        Args:
            now: The time, in seconds.

        Returns:
            For each rank, the number of entries to each of these plans that it has reported since it last forgot them.
        """
        to_send: dict[int, dict[str, int]] = {}
        if len(self._plans) <= MAX_PLANS:
            return to_send
        for key in self._plans:
            counts = self.counts(key)
            count = max(counts.values())
            if min(counts.values()) < count or self._settled.get(key, (-1, now))[0] != count:
                self._settled[key] = count, now
            elif now - self._settled[key][1] >= IDLE and key not in self._forgetting:
                self._forgetting.add(key)
                for rank in counts:
                    to_send.setdefault(rank, {})[key] = count - self._before.get(rank, {}).get(key, 0)
        return to_send

    def forgotten(self, rank: int, asked: Mapping[str, int], keys: Collection[str]) -> list[str]:
        """Records that a rank has forgotten plans, and counts from zero when it enters one of them again.

        Args:
            rank: The rank.
            asked: What `to_forget` returned for it.
            keys: The plans that it has forgotten; it still uses the others.

        Returns:
            The plans that all ranks have forgotten, and that are now forgotten here as well.
        """
        before = self._before.setdefault(rank, {})
        for key in keys:
            before[key] = before.get(key, 0) + asked[key]
        return [key for key in asked if self._forget_if_all_have(key)]

    def _forget_if_all_have(self, key: str) -> bool:
        counts = self.counts(key)
        answered = self._answers.setdefault(key, 0) + 1
        self._answers[key] = answered
        if answered < len(counts):
            return False
        del self._answers[key]
        self._forgetting.discard(key)
        self._settled.pop(key, None)
        if any(self._before.get(rank, {}).get(key) != max(counts.values()) for rank in counts):
            return False
        del self._plans[key]
        for kept in (self._counts, self._before, self._sites):
            for of_rank in kept.values():
                of_rank.pop(key, None)
        return True

    def concerned(self) -> set[int]:
        """The ranks that wait for others in a plan, and the ranks that they wait for."""
        return {rank for wait in self._current() for rank in (wait.waiter, wait.missing)}

    def check(self, now: float, places: Mapping[int, str] | None = None) -> list[Finding]:
        """Finds problems at the time `now`, the worst first; `places` says what late ranks were doing."""
        waits = self._current()
        self._since = {wait: self._since.get(wait, now) for wait in waits}
        self._warned = {wait: at for wait, at in self._warned.items() if wait in self._since}
        return [*self._mismatches(now), *self._departures(now), *self._stalls(now, places or {})]

    def waited_for_in(self, waiter: int | None, missing: int) -> str:
        """Names the plan in which one rank waits for another; "" if it is not known."""
        found = [wait for wait in self._current() if (wait.waiter, wait.missing) == (waiter, missing)]
        return self._named(found[0]) if found else ""

    def _label(self, wait: Wait) -> str:
        return str(self._plans[wait.key]["label"] if wait.key in self._plans else f'the exchange "{wait.key}"')

    def _named(self, wait: Wait) -> str:
        """A plan's label, and where the waiting rank entered it."""
        label, site = self._label(wait), self._site(wait)
        return f"{label} ({site})" if site else label

    def _hint(self, wait: Wait) -> str:
        """What to write instead if a rank waits in a call that it may have made alone by mistake; else ""."""
        hint = self._plans[wait.key]["hint"] if wait.key in self._plans else ""
        return f" ({hint})" if hint else ""

    def _site(self, wait: Wait) -> str:
        return self._sites.get(wait.waiter, {}).get(wait.key, "")

    def _current(self) -> list[Wait]:
        waits = []
        for key in self._plans:
            counts = self.counts(key)
            low = min(counts.values(), default=0)
            behind = [rank for rank, count in counts.items() if count == low]
            waits += [Wait(rank, missing, key, count) for rank, count in counts.items() if count > low
                      for missing in behind]
        for name, exchange in self._exchanges.items():
            missing_there = [rank for rank in self._ranks if rank not in exchange.there]
            waits += [Wait(rank, missing, name, 0) for rank in sorted(exchange.waiting) for missing in missing_there]
        return waits

    def _mismatches(self, now: float) -> list[Finding]:
        old = [wait for wait, since in self._since.items() if now - since >= self.limits[0]]
        for circle in _circles(old):
            stuck = _connected(circle[0].waiter, self._since)
            keys = {wait.key for wait in self._since if wait.waiter in stuck and wait.missing in stuck}
            waiting = {wait.waiter for wait in self._since if wait.key in keys}
            if keys.isdisjoint(self._exchanges) and all(rank in waiting for key in keys
                                                        for rank in self._plans[key]["ranks"]):
                return [Finding(CauseKind.MISMATCH, None, self._difference(circle), tuple(sorted(keys)))]
            # Some rank is late: it would arrive at a collective that the others have given up.
            waited = now - max(self._since[wait] for wait in circle)
            if waited >= PATIENCE * self.limits[0] or not keys.isdisjoint(self._exchanges):
                return [Finding(CauseKind.MISMATCH, None, self._difference(circle))]
        return []

    def _departures(self, now: float) -> list[Finding]:
        return [
            Finding(CauseKind.LEFT, wait.missing, f"left the job normally while rank {wait.waiter} is still waiting for"
                    f" it in {self._named(wait)}{self._hint(wait)}")
            for wait, since in self._since.items()
            if wait.missing in self._left and wait.waiter not in self._left and now - since >= self.limits[0]
            and wait.key not in self._exchanges
        ][:1]

    def _stalls(self, now: float, places: Mapping[int, str]) -> list[Finding]:
        _, warn_after, stall_after = self.limits
        oldest: dict[tuple[str, int], tuple[float, Wait]] = {}
        for wait, since in self._since.items():
            if wait.key in self._exchanges:
                continue
            late = (wait.key, wait.missing)
            oldest[late] = min(oldest.get(late, (since, wait)), (since, wait), key=lambda pair: pair[0])
        findings = []
        for since, wait in oldest.values():
            waited, label = now - since, self._named(wait)
            if stall_after and waited >= stall_after:
                place = places.get(wait.missing, "")
                text = (f"has not entered {label}, in which rank {wait.waiter} has waited {waited:.0f} s for it"
                        " (HVKERAS_STALL_SHUTDOWN sets the limit)" + (f"; last seen: {place}" if place else ""))
                return [Finding(CauseKind.STALLED, wait.missing, text + self._hint(wait))]
            if warn_after and now - self._warned.get(wait, since) >= warn_after:
                self._warned[wait] = now
                end = f"; the job ends after {stall_after:.0f} s" if stall_after else ""
                text = (f"rank {wait.waiter} has waited {waited:.0f} s in {label} for rank {wait.missing}, which has"
                        f" not entered it{end}")
                findings.append(Finding(None, wait.missing, text + self._hint(wait)))
        return findings

    def _difference(self, circle: list[Wait]) -> str:
        """Describes the first difference between plans, and where the ranks entered them."""
        sites = [f"rank {wait.waiter} at {self._site(wait)}" for wait in circle if self._site(wait)]
        end = "; " + ", ".join(sites) if sites else ""
        hints = [hint for wait in circle if (hint := self._hint(wait))]
        if len(circle) > 2 or any(wait.key in self._exchanges for wait in circle):
            places = ", ".join(f"rank {wait.waiter} in {self._named(wait)} for rank {wait.missing}" for wait in circle)
            return f"{in_words([wait.waiter for wait in circle])} wait for each other: {places}{''.join(hints[:1])}"
        one, other = circle
        return self._first_difference(one, other) + end + (hints[0] if hints else self._hint_of_models(one, other))

    def _hint_of_models(self, one: Wait, other: Wait) -> str:
        """Says that the models differ if two ranks send different shapes for a whole model; else ""."""
        mine, theirs = self._plans[one.key], self._plans[other.key]
        if not (mine["is_of_model"] and theirs["is_of_model"]):
            return ""
        pairs = list(zip(mine["kinds"], theirs["kinds"], strict=False))
        of_one_dtype = [pair for pair in pairs if pair[0].partition("[")[0] == pair[1].partition("[")[0]]
        differ = len(mine["kinds"]) != len(theirs["kinds"]) or any(left != right for left, right in of_one_dtype)
        return _UNLIKE_MODELS if differ else ""

    def _first_difference(self, one: Wait, other: Wait) -> str:
        """Describes the first difference between two plans: in kind, then tensors, then options, then names."""
        mine, theirs = self._plans[one.key], self._plans[other.key]
        start = f"ranks {one.waiter} and {other.waiter} communicate different things and wait for each other: "
        mine_does, theirs_does = (f"{plan['operation']} {plan['how']}".rstrip() for plan in (mine, theirs))
        whole = (f"rank {one.waiter} is in {mine['label']} ({mine_does}, ranks {mine['ranks']}), rank"
                 f" {other.waiter} in {theirs['label']} ({theirs_does}, ranks {theirs['ranks']})")
        if mine["operation"] != theirs["operation"] or mine["ranks"] != theirs["ranks"]:
            return start + whole
        where = f"in {mine['label']}" + ("" if mine["label"] == theirs["label"]
                                         else f" (rank {other.waiter}: {theirs['label']})")
        for index, kinds in enumerate(zip(mine["kinds"], theirs["kinds"], strict=False)):
            if kinds[0] != kinds[1]:
                return start + (f"{where}, tensor {index + 1} is {_tensor(mine, index)} on rank {one.waiter} and"
                                f" {_tensor(theirs, index)} on rank {other.waiter}")
        counts = (len(mine["kinds"]), len(theirs["kinds"]))
        if counts[0] != counts[1]:
            longer = mine if counts[0] > counts[1] else theirs
            return start + (f"{where}, rank {one.waiter} has {counts[0]} tensors and rank {other.waiter} {counts[1]};"
                            f" the first that only one has is {_tensor(longer, min(counts))}")
        return start + whole


def _circles(waits: Iterable[Wait]) -> Iterator[list[Wait]]:
    """Finds ranks that wait for each other: for each rank, the shortest circle in which it is the lowest rank."""
    by_waiter: dict[int, dict[int, Wait]] = {}
    for wait in waits:
        by_waiter.setdefault(wait.waiter, {}).setdefault(wait.missing, wait)
    for start in sorted(by_waiter):
        found: list[Wait] = []
        paths: dict[int, list[Wait]] = {start: []}
        queue = collections.deque([start])
        while queue and not found:
            rank = queue.popleft()
            for missing, wait in by_waiter.get(rank, {}).items():
                if missing == start:
                    found = [*paths[rank], wait]
                    break
                if missing > start and missing not in paths:
                    paths[missing] = [*paths[rank], wait]
                    queue.append(missing)
        if found:
            yield found


def _connected(rank: int, waits: Collection[Wait]) -> set[int]:
    """The ranks that a rank waits for and that wait for it, directly or through others."""
    def reached(pairs: Collection[tuple[int, int]]) -> set[int]:
        found, queue = {rank}, [rank]
        while queue:
            at = queue.pop()
            more = {end for start, end in pairs if start == at} - found
            found |= more
            queue += more
        return found

    pairs = {(wait.waiter, wait.missing) for wait in waits}
    return reached(pairs) & reached({(missing, waiter) for waiter, missing in pairs})


def _tensor(plan: PlanDescription, index: int) -> str:
    return f"{plan['names'][index]} {plan['kinds'][index]}"
