"""What ranks agree on through the control server: gathered values, counts of entered plans, joins and early stops."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.deadlocks import Finding, Waits
from hvkeras.control.handler import Members
from hvkeras.control.join import Participation
from hvkeras.control.messages import (
    AllJoined,
    AllValues,
    Deadlines,
    ForgetPlans,
    Heartbeat,
    JoinCalled,
    Message,
    MissingRanks,
    PlansForgotten,
    RefusalConfirmed,
    SomeJoined,
    StopAnswer,
    StopWish,
    Value,
)
from hvkeras.control.ranks import Ranks, RankState
from hvkeras.control.stalls import Stalls
from hvkeras.control.stop_agreement import Stops


class Coordinator:
    """Coordinates the ranks of a job, and finds those that wait for each other, or make no progress.

    Args:
        ranks: The ranks.
        members: Their connections.
        deadlines: The time limits.
    """

    def __init__(self, ranks: Ranks, members: Members, deadlines: Deadlines) -> None:
        self._ranks = ranks
        self._members = members
        self._gathers: dict[str, float] = {}
        self._participation = Participation()
        self._announced_busy = False
        self._stops = Stops()
        self.waits: Waits = Waits(ranks.size, deadlines.mismatch, deadlines.stall_warning, deadlines.stall_shutdown)
        self._stalls = Stalls(deadlines.stall_warning, deadlines.stall_shutdown)

    def set_deadlines(self, deadlines: Deadlines) -> None:
        """Takes over the deadlines of rank 0, whose script may have set others than the server was started with."""
        self.waits.limits = (deadlines.mismatch, deadlines.stall_warning, deadlines.stall_shutdown)
        self._stalls.limits = (deadlines.stall_warning, deadlines.stall_shutdown)

    def on_message(self, rank: RankState, message: Message) -> None:
        """Handles a message from a rank."""
        number = rank.member.number
        match message:
            case Heartbeat():
                self._count(number, message)
            case Value():
                rank.values[message.key] = message.value
                self._gather(number, message.key)
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
                self._send(self._stops.ask(number, message.fit, message.ranks))
            case StopAnswer():
                self._send(self._stops.receive(number, message.fit, message.executions))

    def set_left(self, rank: RankState) -> None:
        """Records that a rank has left the job in good order, or takes part in it again, by its `left`."""
        self.waits.set_left(rank.member.number, rank.left)
        if rank.left and self._participation.joined:
            self._ranks.end_with(CauseKind.LEFT, rank.member, "left the job normally while rank"
                                 f" {self._participation.joined[0]} waits for it in join()")

    def check(self, now: float) -> Iterator[Finding]:
        """Finds problems that time brings to light, the worst first; starts to refuse plans that do not match.

        Args:
            now: The time, in seconds.
        """
        if not self._participation.is_busy:
            self._send((rank, ForgetPlans(counts)) for rank, counts in self.waits.to_forget(now).items())
        places = {number: rank.doing for number, rank in self._ranks.present.items()}
        for finding in [*self.waits.check(now, places), *self._stalls.check(self._occupied())]:
            if finding.keys and self._participation.refuse(finding, now):
                self._request_participation()
            else:
                yield finding

    def send_missing(self) -> None:
        """Tells the ranks that wait in an exchange for whom they wait."""
        for key in self._gathers:
            missing = [number for number in range(self._ranks.size)
                       if number not in self._ranks.present or key not in self._ranks.present[number].values]
            for rank in self._ranks.present.values():
                if key in rank.values:
                    rank.member.send(MissingRanks(key, missing))

    def _count(self, number: int, message: Heartbeat) -> None:
        for key, plan in message.plans.items():
            self.waits.describe(key, plan)
        self.waits.update(number, message.counts, message.sites)
        self._participation.learn(message.calls)
        self.waits.set_waiting(number, message.waiting_in)
        self._stalls.update(number, message.standstill)
        self._request_participation()

    def _request_participation(self) -> None:
        self._send(self._participation.requests(self.waits))
        if self._participation.is_busy != self._announced_busy:
            self._announced_busy = self._participation.is_busy
            self._members.broadcast(SomeJoined(self._announced_busy))

    def _join(self, number: int) -> None:
        if left := self._ranks.leavers():
            self._ranks.end_with(CauseKind.LEFT, left[0].member, f"left the job normally before rank {number} called"
                                 " join(), which all ranks must call")
            return
        self._participation.joined.append(number)
        if len(self._participation.joined) == self._ranks.size:
            self._participation.joined.clear()
            self._members.broadcast(AllJoined(number))
        self._request_participation()

    def _gather(self, number: int, key: str) -> None:
        self.waits.come(number, key)
        self._gathers.setdefault(key, time.monotonic())
        present = self._ranks.present
        if len(present) == self._ranks.size and all(key in rank.values for rank in present.values()):
            del self._gathers[key]
            self.waits.finish(key)
            values = [present[each].values.pop(key) for each in range(self._ranks.size)]
            self._members.broadcast(AllValues(key, values))

    def _occupied(self) -> set[int]:
        """The ranks whose lack of progress is not a stall: they wait for others, are waited for, or have left."""
        left = {number for number, rank in self._ranks.present.items() if rank.left}
        return self.waits.concerned() | left | set(self._participation.joined)

    def _send(self, requests: Iterable[tuple[int, Message]]) -> None:
        for number, request in requests:
            if number in self._members:
                self._members[number].send(request)
