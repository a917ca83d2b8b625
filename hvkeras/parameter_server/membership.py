"""Membership of a cluster, on the chief's end of the control channel. Only workers may leave and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hvkeras.control import wire
from hvkeras.control.cause import Cause
from hvkeras.control.connections import Member
from hvkeras.control.relay import Deadlines
from hvkeras.control.server import ControlServer
from hvkeras.control.waiting import Waiting, task_name
from hvkeras.errors import PeerError
from hvkeras.host.console import say
from hvkeras.launch_environments import Launch
from hvkeras.settings import Settings

_LOST = "ended unexpectedly (killed, crashed, or out of memory)"
_POLL_INTERVAL = 0.1  # seconds between checks of which tasks have connected


class Membership(ControlServer):
    """Tracks every task of a cluster, and decides whether the job continues when one is lost.

    A worker may be lost, and may come back, as long as another worker runs or one comes back in time. A lost parameter
    server ends the job, since its variables are lost with it. A connected task that gives no sign of life also ends the
    job, since no other task can take over its work.

    Args:
        launch: The chief's place in the cluster.
        settings: The settings in force.
        secret: The job's secret.
        host: The address to listen on.
        port: The port, or 0 for a free one.
        on_end: Called once, from the server's thread, with the cause when the job ends early.
    """

    closes_when_complete = False  # lost workers may reconnect

    def __init__(self, launch: Launch, settings: Settings, secret: bytes, host: str, port: int,
                 on_end: Callable[[Cause], None]) -> None:
        super().__init__(launch.size, secret, host, port, Deadlines.from_settings(settings), on_end)
        self._launch = launch
        self._start_timeout = settings.start_timeout
        self._liveness = settings.liveness_timeout
        self._all_connected = False
        self._no_worker_since = 0.0

    def wait_for_all(self) -> None:
        """Waits until all workers and parameter servers have connected.

        Raises:
            PeerError: Some tasks, which the message names, did not connect in time, or one connected and was lost.
        """
        waiting = Waiting(self._start_timeout)
        while missing := [rank for rank in range(1, self.size) if rank not in self._members]:
            if self.cause is not None:
                raise PeerError(f"The job ended: {self.cause.sentence()}")
            waiting.check(", ".join(task_name(self._launch, rank) for rank in missing), "not connected to the chief")
            time.sleep(_POLL_INTERVAL)
        self._all_connected = True

    def task_of(self, rank: int) -> str:
        """Returns the name of a task in TF_CONFIG: `worker 0`."""
        tasks = self._launch.tasks
        return tasks[rank] if rank < len(tasks) else f"evaluator {rank - self.size}"

    # The methods below run in the server's thread.

    def _describe(self, member: Member) -> str:
        return f"{self.task_of(member.rank)} on {member.host} (pid {member.pid})"

    def _is_worker(self, rank: int) -> bool:
        return self.task_of(rank).startswith("worker ")

    def _admit(self, hello: wire.Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        rank = int(hello["rank"])
        first = self._members.get(rank)
        if first is not None or int(hello["size"]) != self.size:  # the other tasks continue without the newcomer
            reason = (f"{self._describe(first)} is connected already; give each process a task of its"
                      " own" if first is not None
                      else f"the new process was started in a cluster of {hello['size']} tasks, the chief in one of"
                      f" {self.size}")
            Member(rank, "", 0, writer, seal, 0.0).send({"type": "refused", "reason": reason})
            return None
        member = super()._admit(hello, writer, seal)
        if member is not None and self._lost.pop(rank, None) is not None:
            say(f"{self._describe(member)} is back")
        return member

    def _lose(self, member: Member) -> None:
        if self._members.get(member.rank) is not member:
            return
        del self._members[member.rank]
        if not member.arrived:  # it comes again, or is missing
            return
        self._lost[member.rank] = member
        stopping = self._stopping is not None and self._stopping.is_set()
        if self.cause is not None or stopping or member.left:
            return
        if self.task_of(member.rank).startswith("ps "):
            self._end(Cause("lost", None, member.host, member.pid, f"{self._describe(member)} {_LOST}"))
        elif self._is_worker(member.rank):
            others = sum(self._is_worker(rank) for rank in self._members)
            say(f"{self._describe(member)} {_LOST}; " + (f"training continues with {others} of the"
                                                         " workers" if others else
                                                         "training waits for it to come back"))
        else:
            say(f"{self._describe(member)} {_LOST}; training continues")

    def _check_members(self, now: float) -> None:
        if self.cause is not None:
            return
        for member in list(self._members.values()):
            if now - member.seen > self._liveness and not member.left:
                self._end(Cause("silent", None, member.host, member.pid, f"{self._describe(member)} gave no sign of"
                                f" life for {self._liveness:g} s (stopped, frozen or cut off)"))
                return
        if not self._all_connected or any(self._is_worker(rank) for rank in self._members):
            self._no_worker_since = now
        elif now - self._no_worker_since > self._start_timeout:
            workers = ", ".join(self._describe(member) for rank, member in sorted(self._lost.items())
                                if self._is_worker(rank))
            self._end(Cause("lost", None, "", None, f"all workers were lost ({workers}) and none came back for"
                            f" {self._start_timeout:g} s (HVKERAS_START_TIMEOUT)"))
