"""What ranks agree on through the control server: gathered values, counts of entered plans, joins and early stops."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvkeras.control import wire
from hvkeras.control.cause import Cause
from hvkeras.control.connections import Connections, Member
from hvkeras.control.join import Participation
from hvkeras.control.stalls import Stalls
from hvkeras.control.stop_agreement import Request, Stops
from hvkeras.control.waits import Waits
from hvkeras.settings import Settings


@dataclass(frozen=True)
class Deadlines:
    """The server's time limits, in seconds (see `hvkeras.settings`)."""

    liveness: float = 15.0
    stall_warning: float = 60.0
    stall_shutdown: float = 600.0
    exit_grace: float = 3.0
    mismatch: float = 3.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Deadlines:
        """The deadlines from the settings."""
        return cls(settings.liveness_timeout, settings.stall_warning, settings.stall_shutdown, settings.exit_grace,
                   settings.mismatch_after)


class Relay(Connections):
    """Relays what ranks agree on, and counts the plans that they enter.

    Args:
        size: The number of ranks to expect.
        secret: The job's secret, which every rank must prove.
        host: The address to listen on.
        port: The port, or 0 for a free one.
        deadlines: The time limits.

    Raises:
        MachineError: The server cannot listen on the address.
    """

    def __init__(self, size: int, secret: bytes, host: str, port: int, deadlines: Deadlines) -> None:
        super().__init__(size, secret, host, port)
        self.deadlines = deadlines
        self._gathers: dict[str, float] = {}
        self._participation = Participation()
        self._announced_busy = False
        self._stops = Stops()
        self._waits = Waits(size, deadlines.mismatch, deadlines.stall_warning, deadlines.stall_shutdown)
        self._stalls = Stalls(deadlines.stall_warning, deadlines.stall_shutdown)

    def _set_deadlines(self, deadlines: Deadlines) -> None:
        """Takes over the deadlines of rank 0, whose script may have set others than this server was started with."""
        self.deadlines = deadlines
        self._waits.limits = (deadlines.mismatch, deadlines.stall_warning, deadlines.stall_shutdown)
        self._stalls.limits = (deadlines.stall_warning, deadlines.stall_shutdown)

    @abc.abstractmethod
    def _end(self, cause: Cause) -> None:
        """Ends the job."""

    def _count(self, member: Member, message: wire.Message) -> None:
        for key, plan in message.get("plans", {}).items():
            self._waits.describe(key, plan)
        self._waits.update(member.rank, message.get("counts", {}), message.get("sites", {}))
        self._participation.learn(message.get("calls", {}))
        if "asks" in message:
            self._waits.set_waiting(member.rank, message["asks"])
        if "still" in message:
            self._stalls.update(member.rank, message["still"])
        self._involve_joined()

    def _confirm_refusal(self, member: Member, message: wire.Message) -> None:
        text = self._participation.confirm(member.rank, message["key"])
        if not message["raises"]:
            self._end(Cause("mismatch", None, "", None, text))
        self._involve_joined()

    def _involve_joined(self) -> None:
        self._send_requests(self._participation.requests(self._waits))
        if self._participation.is_busy != self._announced_busy:
            self._announced_busy = self._participation.is_busy
            self._broadcast({"type": "some joined", "any": self._announced_busy})

    def _set_membership(self, member: Member, left: bool) -> None:
        member.left = left
        self._waits.set_left(member.rank, left)
        if left and self._participation.joined:
            self._end(Cause("left", member.rank, member.host, member.pid, "left the job normally while rank"
                            f" {self._participation.joined[0]} waits for it in join()"))

    def _join(self, member: Member) -> None:
        left = next((other for other in [*self._members.values(), *self._lost.values()] if other.left), None)
        if left is not None:
            self._end(Cause("left", left.rank, left.host, left.pid, "left the job normally before rank"
                            f" {member.rank} called join(), which all ranks must call"))
            return
        self._participation.joined.append(member.rank)
        if len(self._participation.joined) == self.size:
            self._participation.joined.clear()
            self._broadcast({"type": "all joined", "last": member.rank})
        self._involve_joined()

    def _gather(self, member: Member, key: str, value: Any) -> None:
        member.values[key] = value
        self._waits.come(member.rank, key)
        self._gathers.setdefault(key, time.monotonic())
        if len(self._members) == self.size and all(key in other.values for other in self._members.values()):
            del self._gathers[key]
            self._waits.finish(key)
            values = [self._members[rank].values.pop(key) for rank in range(self.size)]
            self._broadcast({"type": "all", "key": key, "values": values})

    def _send_missing(self) -> None:
        for key in self._gathers:
            missing = [rank for rank in range(self.size)
                       if rank not in self._members or key not in self._members[rank].values]
            for member in self._members.values():
                if key in member.values:
                    member.send({"type": "missing", "key": key, "ranks": missing})

    def _send_requests(self, requests: Iterable[Request]) -> None:
        for rank, request in requests:
            if rank in self._members:
                self._members[rank].send(request)
