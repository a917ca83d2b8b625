"""Detection of deadlocks and stalls from the ranks' counts of entered plans.

A rank enters a plan just before the collective runs (`hvkeras.job.plans`), and leaves it only when all other ranks have
entered it equally often. A rank with a higher count than another rank is therefore waiting for that rank. So is a rank
that waits in an exchange over this channel.

- Mismatch: ranks that wait for each other, two of them or a longer cycle, would wait forever.
- Departure: a rank waits for one that has left the job.
- Stall: a rank waits for one that is late. This leads first to a warning, then to the end of the job. In an exchange,
  the waiting rank has its own timeout.

The cost of a heartbeat is proportional to the counts that have changed. The cost of a check is proportional to the
plans in which ranks wait; only long waits also cost time per rank. `sync_points` hold the state of plans and exchanges,
`wait_graph` finds the cycles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from hvkeras.control.cause import CauseKind
from hvkeras.control.messages import PlanDescription
from hvkeras.control.sync_points import CheckTime, ExchangeSyncPoint, PlanSyncPoint, SyncPoint
from hvkeras.control.wait_graph import Graph, Group, Wait
from hvkeras.host.console import format_numbers, format_ranks, some_of

MAX_PLANS = 256  # number of plans that are stored even if no rank enters them
MAX_WARNINGS = 8  # number of ranks that report their location at the same time
IDLE = 2.0  # seconds after which a plan that all ranks have entered equally often may be forgotten
PATIENCE = 3  # factor for the wait before a mismatch if some of its ranks have not arrived

_DIFFERENT_MODELS = ("the models themselves differ: build the same model on every rank; a tuner must give all ranks"
                     " the same trial")
STAY = "make the same calls on every rank, and let a script exit only when all ranks have made them"
_SAME_CALLS = "make the same calls in the same order, with tensors of the same shapes and types, on every rank"


@dataclass(frozen=True)
class Problem:
    """A detected problem.

    Attributes:
        kind: The kind of failure that ends the job; None for a warning.
        rank: The rank at fault, or the one that must report its location; None for none.
        text: A description; "" if another warning contains it.
        keys: The plans of a mismatch in which all of their ranks wait, so that all can raise.
    """

    kind: CauseKind | None
    rank: int | None
    text: str
    keys: tuple[str, ...] = ()


class Waits:
    """Counts of entered plans, from which long waits are detected.

    Args:
        size: The number of ranks in the job.
        mismatch_after: Seconds for which ranks must wait for each other to count as a mismatch.
        warn_after: Seconds of waiting until a warning; repeated at that interval.
        stall_after: Seconds of waiting until the job ends; 0 for never.
    """

    def __init__(self, size: int, mismatch_after: float, warn_after: float, stall_after: float) -> None:
        self._ranks = range(size)
        self.limits = (mismatch_after, warn_after, stall_after)
        self._plans: dict[str, PlanSyncPoint] = {}
        self._unequal: dict[str, PlanSyncPoint] = {}  # plans in which ranks wait
        self._reported: set[str] = set()  # plans with reports that are not applied yet
        self._described = 0
        self._exchanges: dict[str, ExchangeSyncPoint] = {}
        self._left: set[int] = set()
        self._next = CheckTime()  # the next check

    def describe(self, key: str, plan: PlanDescription) -> None:
        """Record a plan's description."""
        if key in self._plans:
            self._plans[key].plan = plan
        else:
            self._described += 1
            self._plans[key] = PlanSyncPoint(self._described, plan, self._next)

    def has_plan(self, key: str) -> bool:
        """Return whether a plan has been described."""
        return key in self._plans

    def update(self, ranks: Collection[int], counts: Mapping[str, int], sites: Mapping[str, str] | None = None) -> None:
        """Record the counts of ranks, and the user code that enters plans; other plans are unchanged.

        Args:
            ranks: The ranks, which have all reported the same.
            counts: The number of entries of each rank into plans that have been described.
            sites: The lines of user code that have changed.
        """
        for key, count in counts.items():
            self._plans[key].report(ranks, count)
        self._reported.update(counts)
        for key, site in (sites or {}).items():
            self._plans[key].sites.update(dict.fromkeys(ranks, site))

    def _apply_reports(self) -> None:
        for key in self._reported:
            plan = self._plans[key]
            plan.apply_reports(self._next)
            if plan.has_waiters:
                self._unequal[key] = plan
            else:
                self._unequal.pop(key, None)
        self._reported.clear()

    def enter_exchange(self, rank: int, exchange: str) -> None:
        """Record that a rank has entered an exchange."""
        if exchange not in self._exchanges:
            self._exchanges[exchange] = ExchangeSyncPoint(exchange, self._ranks, self._next)
        self._exchanges[exchange].missing.discard(rank)

    def set_waiting(self, ranks: Collection[int], names: Collection[str]) -> None:
        """Record the exchanges in which ranks wait, so that they do nothing else."""
        for name, exchange in self._exchanges.items():
            exchange.set_waiting(ranks, name in names, self._next)

    def finish_exchange(self, exchange: str) -> None:
        """Record that all ranks have entered an exchange."""
        self._exchanges.pop(exchange, None)

    def set_left(self, rank: int, left: bool) -> None:
        """Record that a rank has left the job normally, or participates again."""
        (self._left.add if left else self._left.discard)(rank)

    def plan(self, key: str) -> PlanDescription:
        """Return a plan's description."""
        return self._plans[key].plan

    def sync_point(self, key: str) -> PlanSyncPoint:
        """Return the state of a plan, for reading."""
        self._apply_reports()
        return self._plans[key]

    def counts(self, key: str) -> dict[int, int]:
        """Return the number of entries of each rank into a plan."""
        return dict(self.sync_point(key).counts)

    def unequal(self) -> list[str]:
        """Return the keys of the plans that some ranks have entered more often than others."""
        self._apply_reports()
        return sorted(self._unequal, key=lambda key: self._plans[key].number)

    def plans_of(self, rank: int) -> list[str]:
        """Return the keys of the plans in which a rank participates."""
        return [key for key, plan in list(self._plans.items()) if rank in plan.counts]

    def to_forget(self, now: float) -> dict[int, dict[str, int]]:
        """Return the plans that ranks may forget: if there are many, those that no rank waits in or has entered lately.

        Args:
            now: The time, in seconds.
        """
        to_send: dict[int, dict[str, int]] = {}
        if len(self._plans) <= MAX_PLANS:
            return to_send
        self._apply_reports()
        for key, plan in self._plans.items():
            count, since = plan.settled
            if plan.has_waiters or plan.low != count:
                plan.settled = plan.high, now
            elif now - since >= IDLE and not plan.is_being_forgotten:
                plan.is_being_forgotten = True
                for rank in plan.counts:
                    to_send.setdefault(rank, {})[key] = count - plan.before.get(rank, 0)
        return to_send

    def forgotten(self, rank: int, asked: Mapping[str, int], keys: Collection[str]) -> list[str]:
        """Record that a rank has forgotten plans; its counts of them restart from zero.

        Args:
            asked: The result of `to_forget` for it.
            keys: The plans that it has forgotten; the others are still in use.

        Returns:
            The plans that all ranks have forgotten, and that are now removed here as well.
        """
        self._apply_reports()
        for key in keys:
            before = self._plans[key].before
            before[rank] = before.get(rank, 0) + asked[key]
        return [key for key in asked if self._forget_if_all_have(key)]

    def _forget_if_all_have(self, key: str) -> bool:
        plan = self._plans[key]
        plan.answers += 1
        if plan.answers < len(plan.counts) or not plan.finish_forgetting():
            return False
        del self._plans[key]
        return True

    def involved(self) -> set[int]:
        """Return the ranks that wait for others in a plan, and the ranks that they wait for."""
        return {rank for _, point in self._waited_in()
                for ranks in (point.missing, *point.waiting.values()) for rank in ranks}

    def check(self, now: float, describe: Callable[[int], str] = lambda _: "") -> list[Problem]:
        """Find problems, the worst first.

        Args:
            now: The time, in seconds.
            describe: Returns what a late rank was doing, or "".
        """
        self._apply_reports()
        self._next.at = now
        self._next = CheckTime()
        return [*self._mismatches(now), *self._departures(now), *self._stalls(now, describe)]

    def waited_for_in(self, waiter: int | None, missing: int) -> str:
        """Return the label of the plan or exchange in which one rank waits for another; "" if it is not known."""
        return next((_label_with_site(point, waiter) for _, point in self._waited_in() if missing in point.missing
                     and waiter is not None and any(waiter in ranks for ranks in point.waiting.values())), "")

    def _waited_in(self) -> Iterator[tuple[str, SyncPoint]]:
        for key in self.unequal():
            yield key, self._plans[key]
        for name, exchange in self._exchanges.items():
            if exchange.has_waiters:
                yield name, exchange

    def _groups(self, until: float) -> list[Group]:
        """Return the ranks that have waited since `until` or longer, with the ranks that they wait for."""
        found = []
        for key, point in self._waited_in():
            if point.since.at <= until:
                waiting = [ranks for since, ranks in point.waiting.items() if since.at <= until]
                found += [Group(key, frozenset().union(*waiting), frozenset(point.missing))] if waiting else []
        return found

    def _mismatches(self, now: float) -> list[Problem]:
        groups = self._groups(now - self.limits[0])
        old = Graph(groups if len(groups) > 1 else [])
        if not old.components:
            return []
        component_of = {rank: component for component in Graph(self._groups(math.inf)).components
                        for rank in component.ranks}  # from waits of any duration
        for component in old.components:
            cycle = old.shortest_cycle(component)
            keys = component_of[cycle[0].waiter].keys
            waiting = {rank for key in keys for ranks in self._sync_point(key).waiting.values() for rank in ranks}
            if keys.isdisjoint(self._exchanges) and all(waiting.issuperset(self._plans[key].counts) for key in keys):
                return [Problem(CauseKind.MISMATCH, None, self._difference(cycle), tuple(sorted(keys)))]
            # Some rank is late: it would enter a collective that the others have left with an error.
            latest_start = now - PATIENCE * self.limits[0]
            if all(self._started_at(wait) <= latest_start for wait in cycle) or not keys.isdisjoint(self._exchanges):
                return [Problem(CauseKind.MISMATCH, None, self._difference(cycle))]
        return []

    def _started_at(self, wait: Wait) -> float:
        point = self._sync_point(wait.key)
        return max(point.since.at, *(since.at for since, ranks in point.waiting.items() if wait.waiter in ranks))

    def _departures(self, now: float) -> list[Problem]:
        for group in self._groups(now - self.limits[0]) if self._left else ():
            missing, waiting = group.missing & self._left, group.waiting - self._left
            if missing and waiting and group.key in self._plans:
                waiter, plan = min(waiting), self._plans[group.key]
                return [Problem(CauseKind.LEFT, min(missing), f"left the job normally while rank {waiter} is still"
                                f" waiting for it in {_label_with_site(plan, waiter)}"
                                f"{_hint(plan) or _as_hint(STAY)}")]
        return []

    def _stalls(self, now: float, describe: Callable[[int], str]) -> list[Problem]:
        _, warn_after, stall_after = self.limits
        shortest_limit = min((limit for limit in (warn_after, stall_after) if limit), default=math.inf)
        findings = []
        for key in self.unequal():
            plan = self._plans[key]
            if now - plan.since.at < shortest_limit:
                continue
            since = max(plan.since.at, min(since.at for since in plan.waiting))
            waited = now - since
            ends = 0 < stall_after <= waited
            if not ends and not 0 < warn_after <= now - max(since, plan.warned_at):
                continue
            waiter = min(rank for moment, ranks in plan.waiting.items() if moment.at <= since for rank in ranks)
            late, label = sorted(plan.missing), _label_with_site(plan, waiter)
            if ends:
                seen = describe(late[0])
                text = (f"has not entered {label}, in which rank {waiter} has waited {waited:.0f} s for it"
                        " (HVKERAS_STALL_SHUTDOWN sets the limit)" + (f"; last seen: {seen}" if seen else ""))
                return [Problem(CauseKind.STALLED, late[0], text + _hint(plan))]
            plan.warned_at = now
            have = "have" if len(late) > 1 else "has"
            end = f"; the job ends after {stall_after:.0f} s" if stall_after else ""
            text = (f"rank {waiter} has waited {waited:.0f} s in {label} for {format_ranks(late)}, which {have} not"
                    f" entered it{end}{_hint(plan)}")
            findings += [Problem(None, rank, "" if rank > late[0] else text) for rank in late[:MAX_WARNINGS]]
        return findings

    def _sync_point(self, key: str) -> SyncPoint:
        return self._plans[key] if key in self._plans else self._exchanges[key]

    def _difference(self, cycle: list[Wait]) -> str:
        """Describe the first difference between plans, and where the ranks entered them."""
        points = [self._sync_point(wait.key) for wait in cycle]
        hints = [hint for point in points if (hint := _hint(point))]
        if len(cycle) > 2 or any(wait.key in self._exchanges for wait in cycle):
            labels = [_label_with_site(point, wait.waiter) for wait, point in zip(cycle, points, strict=True)]
            locations = some_of([f"rank {wait.waiter} in {label} for rank {wait.missing}"
                                 for wait, label in zip(cycle, labels, strict=True)])
            waiters = format_ranks([wait.waiter for wait in cycle])
            return f"{waiters} wait for each other: {locations}{(hints or [_as_hint(_SAME_CALLS)])[0]}"
        sites = [f"rank {wait.waiter} at {site}" for wait, point in zip(cycle, points, strict=True)
                 if (site := point.site(wait.waiter))]
        end = "; " + ", ".join(sites) if sites else ""
        one, other = cycle
        return self._first_difference(one, other) + end + (
            hints[0] if hints else self._hint_of_models(one, other) or _as_hint(_SAME_CALLS))

    def _hint_of_models(self, one: Wait, other: Wait) -> str:
        """Return a hint if two ranks send different shapes for all variables of a model; else ""."""
        mine, theirs = self.plan(one.key), self.plan(other.key)
        if not (mine["is_of_model"] and theirs["is_of_model"]):
            return ""
        pairs = list(zip(mine["kinds"], theirs["kinds"], strict=False))
        same_dtype = [pair for pair in pairs if pair[0].partition("[")[0] == pair[1].partition("[")[0]]
        differ = len(mine["kinds"]) != len(theirs["kinds"]) or any(left != right for left, right in same_dtype)
        return _as_hint(_DIFFERENT_MODELS) if differ else ""

    def _first_difference(self, one: Wait, other: Wait) -> str:
        """Describe the first difference between two plans: in operation, then tensors, then options, then names."""
        mine, theirs = self.plan(one.key), self.plan(other.key)
        start = f"ranks {one.waiter} and {other.waiter} communicate different things and wait for each other: "
        mine_operation, theirs_operation = (f"{plan['operation']} {plan['how']}".rstrip() for plan in (mine, theirs))
        mine_ranks, theirs_ranks = (f"ranks [{format_numbers(plan['ranks'])}]" for plan in (mine, theirs))
        overview = (f"rank {one.waiter} is in {mine['label']} ({mine_operation}, {mine_ranks}), rank {other.waiter} in"
                    f" {theirs['label']} ({theirs_operation}, {theirs_ranks})")
        if mine["operation"] != theirs["operation"] or mine["ranks"] != theirs["ranks"]:
            return start + overview
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
        return start + overview


def _label_with_site(point: SyncPoint, waiter: int) -> str:
    site = point.site(waiter)
    return f"{point.label} ({site})" if site else point.label


def _hint(point: SyncPoint) -> str:
    return _as_hint(point.hint) if point.hint else ""


def _as_hint(text: str) -> str:
    return f". HINT: {text}"


def _tensor(plan: PlanDescription, index: int) -> str:
    return f"{plan['names'][index]} {plan['kinds'][index]}"
