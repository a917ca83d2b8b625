"""Coordination of ranks by the control server: gathered values, counts of entered plans, joins and early stops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.deadlocks import Problem, Waits
from hvkeras.control.exchange import Gathers
from hvkeras.control.join import Participation
from hvkeras.control.messages import (
    AllJoined,
    AllValues,
    Deadlines,
    ForgetPlans,
    Heartbeat,
    JoinCalled,
    Message,
    PlanDescription,
    Plans,
    PlansForgotten,
    PlansWanted,
    RefusalConfirmed,
    SomeJoined,
    StopAnswer,
    StopWish,
    Value,
    ValueDigest,
)
from hvkeras.control.ranks import Ranks, RankState
from hvkeras.control.relayed_ranks import from_runs
from hvkeras.control.stalls import Stalls
from hvkeras.control.stop_agreement import Stops

_Any = TypeVar("_Any")


@dataclass
class _UnknownPlan:
    """A plan without a description: counts and sites by rank, and the rank from which the description was requested."""

    counts: dict[int, int] = field(default_factory=dict)
    sites: dict[int, str] = field(default_factory=dict)
    asked: int | None = None


class Coordinator:
    """Coordinator of a job's ranks; it also detects mismatches and stalls."""

    def __init__(self, ranks: Ranks, deadlines: Deadlines) -> None:
        self._ranks = ranks
        self._gathers = Gathers(ranks.size)
        self._unknown: dict[str, _UnknownPlan] = {}
        self._participation = Participation()
        self._announced_busy = False
        self._stops = Stops()
        self.waits: Waits = Waits(ranks.size, deadlines.mismatch, deadlines.stall_warning, deadlines.stall_shutdown)
        self._stalls = Stalls(deadlines.stall_warning, deadlines.stall_shutdown)

    def set_deadlines(self, deadlines: Deadlines) -> None:
        """Apply the deadlines of rank 0, whose script may have set others than the server was started with."""
        self.waits.limits = (deadlines.mismatch, deadlines.stall_warning, deadlines.stall_shutdown)
        self._stalls.limits = (deadlines.stall_warning, deadlines.stall_shutdown)

    def on_message(self, rank: RankState, message: Message) -> None:
        """Handle a message from a rank."""
        number = rank.member.number
        match message:
            case Heartbeat():
                self.count([number], message)
            case Plans():
                self._add_plans(message.plans)
            case Value() | ValueDigest():
                self._gather(number, message)
            case JoinCalled():
                self._join(number)
            case RefusalConfirmed():
                text = self._participation.confirm(number, message.key)
                if not message.raises:
                    self._ranks.end(Cause(CauseKind.MISMATCH, None, "", None, text))
                self._request_participation()
            case PlansForgotten():
                self._participation.forget(self.waits.forgotten(number, message.asked, message.keys))
            case StopWish():
                self._send(self._stops.ask(number, message.fit, from_runs(message.ranks)))
            case StopAnswer():
                self._send(self._stops.receive(number, message.fit, message.executions))

    def set_left(self, rank: RankState) -> None:
        """Record that a rank has left the job normally, or participates again, from its `left`."""
        self.waits.set_left(rank.member.number, rank.left)
        if rank.left and self._participation.joined:
            self._ranks.end_with(CauseKind.LEFT, rank.member, "left the job normally while rank"
                                 f" {self._participation.joined[0]} waits for it in join()")

    def check(self, now: float) -> Iterator[Problem]:
        """Find problems that depend on time, the worst first, and start to refuse mismatched plans.

        Args:
            now: The time, in seconds.
        """
        if not self._participation.is_busy:
            self._send(([rank], ForgetPlans(counts)) for rank, counts in self.waits.to_forget(now).items())
        stalls = self._stalls.check(self._busy_ranks()) if self._stalls.any_stalled else []
        for finding in [*self.waits.check(now, self._last_location), *stalls]:
            if finding.keys and self._participation.refuse(finding, now):
                self._request_participation()
            else:
                yield finding

    def on_leave(self, number: int) -> None:
        """Handle the end of a rank's connection."""
        self._gathers.forget(number)
        self._ask_for_plans([key for key, plan in self._unknown.items() if plan.asked == number])

    def send_missing(self) -> None:
        """Notify the ranks that wait in an exchange of the missing ranks."""
        for there, message in self._gathers.missing():
            self._ranks.send(there, message)

    def count(self, numbers: Sequence[int], message: Heartbeat) -> None:
        """Handle the same heartbeat from several ranks."""
        unknown = [key for key in message.counts if not self.waits.has_plan(key)]
        for key in unknown:
            plan = self._unknown.setdefault(key, _UnknownPlan())
            plan.counts.update(dict.fromkeys(numbers, message.counts[key]))
            if key in message.sites:
                plan.sites.update(dict.fromkeys(numbers, message.sites[key]))
        self._ask_for_plans([key for key in unknown if self._unknown[key].asked is None])
        if self._unknown:
            self.waits.update(numbers, self._known(message.counts), self._known(message.sites))
        else:
            self.waits.update(numbers, message.counts, message.sites)
        self._participation.add_calls(message.calls)
        self.waits.set_waiting(numbers, message.waiting_in)
        for number in numbers:
            self._stalls.update(number, message.standstill)
        self._request_participation()

    def _known(self, values: Mapping[str, _Any]) -> dict[str, _Any]:
        return {key: value for key, value in values.items() if key not in self._unknown}

    def _ask_for_plans(self, keys: Iterable[str]) -> None:
        """Request the description of each plan from one of the ranks that have entered it; all have the same."""
        to_ask: dict[int, list[str]] = {}
        for key in keys:
            plan = self._unknown[key]
            plan.asked = next((number for number in plan.counts if number in self._ranks.present), None)
            if plan.asked is not None:
                to_ask.setdefault(plan.asked, []).append(key)
        for number, wanted in to_ask.items():
            self._ranks.send([number], PlansWanted(wanted))

    def _add_plans(self, plans: Mapping[str, PlanDescription]) -> None:
        for key, plan in plans.items():
            self.waits.describe(key, plan)
            if (unknown := self._unknown.pop(key, None)) is not None:
                for number, count in unknown.counts.items():
                    self.waits.update([number], {key: count},
                                      {key: unknown.sites[number]} if number in unknown.sites else {})
        self._request_participation()

    def _request_participation(self) -> None:
        self._send(([number], request) for number, request in self._participation.requests(self.waits))
        if self._participation.is_busy != self._announced_busy:
            self._announced_busy = self._participation.is_busy
            self._ranks.broadcast(SomeJoined(self._announced_busy))

    def _join(self, number: int) -> None:
        if left := self._ranks.leavers():
            self._ranks.end_with(CauseKind.LEFT, left[0].member, f"left the job normally before rank {number} called"
                                 " join(), which all ranks must call")
            return
        self._participation.join(number)
        if len(self._participation.joined) == self._ranks.size:
            self._participation.joined.clear()
            self._ranks.broadcast(AllJoined(number))
        self._request_participation()

    def _gather(self, number: int, message: Value | ValueDigest) -> None:
        self.waits.enter_exchange(number, message.key)
        for answer in self._gathers.receive(number, message):
            if isinstance(answer, AllValues):
                self.waits.finish_exchange(message.key)
                self._ranks.broadcast(answer)
            else:
                self._ranks.send([number], answer)

    def _last_location(self, number: int) -> str:
        rank = self._ranks.present.get(number)
        return "" if rank is None else rank.doing

    def _busy_ranks(self) -> set[int]:
        """Return the ranks whose lack of progress is no stall: they wait, are waited for, or have left or joined."""
        left = {number for number, rank in self._ranks.present.items() if rank.left}
        return self.waits.involved() | left | set(self._participation.joined)

    def _send(self, requests: Iterable[tuple[Sequence[int], Message]]) -> None:
        for numbers, request in requests:
            self._ranks.send(numbers, request)
