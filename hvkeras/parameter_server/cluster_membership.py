"""Membership of a cluster, on the chief's side of the control channel. Only workers may leave and rejoin."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.handler import Handler, Member, Members
from hvkeras.control.launch_environments import Launch
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import ExitReported, Failed, Heartbeat, LeftJob, Message
from hvkeras.control.ranks import Ranks, RankState
from hvkeras.control.rendezvous import Waiting
from hvkeras.control.server import BEAT
from hvkeras.errors import PeerError, summary
from hvkeras.host.console import say, some_of
from hvkeras.settings import Settings

_LOST = "ended unexpectedly (killed, crashed, or out of memory)"
_POLL_INTERVAL = 0.1  # seconds between checks of which tasks have connected


class ClusterHandler(Handler):
    """Handler that tracks the tasks of a cluster, and decides whether the job continues when a task is lost.

    Workers may be lost and rejoin, if another worker is running or rejoins in time. A lost parameter server ends the
    job, since its variables are lost. A connected task without heartbeats also ends the job, since no other task can
    take over its work.

    Args:
        launch: The cluster, and the chief's task in it.
        on_end: Called once with the cause when the job ends early.

    Attributes:
        all_connected: Whether all tasks have been connected at the same time.
    """

    def __init__(self, launch: Launch, settings: Settings, on_end: Callable[[Cause], None]) -> None:
        self.members = Members()
        self.ranks: Ranks = Ranks(self.members, launch.size, settings.exit_grace, on_end)
        self.all_connected: bool = False
        self._launch = launch
        self._start_timeout = settings.start_timeout
        self._liveness = settings.liveness_timeout
        self._no_worker_since = self._next_beat = 0.0

    def task_of(self, number: int) -> str:
        """Return the role and the index of a task, such as `worker 0`."""
        tasks = self._launch.tasks
        return tasks[number] if number < len(tasks) else f"evaluator {number - self.ranks.size}"

    def on_join(self, member: Member) -> str:
        """Admit a task, or return the reason for rejecting it; the job continues either way."""
        first = self.members.get(member.number)
        if first is not None:
            return f"{self._describe(first)} is connected already; start each process with a different task"
        if member.size != self.ranks.size:
            return (f"the new process was started in a cluster of {member.size} tasks, the chief in one of"
                    f" {self.ranks.size}")
        if self.ranks.cause is not None:
            return self.ranks.cause.sentence()
        self.ranks.present[member.number] = RankState(member)
        if self.ranks.lost.pop(member.number, None) is not None:
            say(f"{self._describe(member)} has rejoined")
        return ""

    def on_message(self, member: Member, message: Message) -> None:
        """Handle a message from a task."""
        rank = self.ranks.present.get(member.number)
        if rank is None or rank.member is not member:  # the task has reconnected
            return
        match message:
            case Failed():
                self.ranks.end(message.cause)
            case LeftJob():
                rank.left = True
            case ExitReported():
                rank.exit_reported = True
        self.ranks.check_exit_reports()

    def on_leave(self, member: Member) -> None:
        """Decide whether the job continues without a task."""
        rank = self.ranks.present.pop(member.number)
        if not member.arrived:  # it did not complete the handshake, and may retry
            return
        self.ranks.lost[member.number] = rank
        self.ranks.check_exit_reports()
        if self.ranks.cause is not None or self.members.serving.is_stopping or rank.left:
            return
        if self.task_of(member.number).startswith("ps "):
            self._end(CauseKind.LOST, member, _LOST)
        elif self._is_worker(member.number):
            others = sum(map(self._is_worker, self.members))
            say(f"{self._describe(member)} {_LOST}; " + (f"training continues with {others} of the"
                                                         " workers" if others else
                                                         "training waits for it to rejoin"))
        else:
            say(f"{self._describe(member)} {_LOST}; training continues")

    def on_tick(self, now: float) -> None:
        """Check all tasks, and send them heartbeats."""
        if self.ranks.cause is None:
            self._check_tasks(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self.members.broadcast(Heartbeat())

    def on_fault(self, what: str, error: BaseException) -> None:
        """End the job after an internal error of hvkeras."""
        self.ranks.end(Cause(CauseKind.EXCEPTION, None, "", None, f"the control channel's server failed {what} with"
                             f" {summary(error)}"))

    def _check_tasks(self, now: float) -> None:
        for rank in self.ranks.present.values():
            if now - rank.member.seen > self._liveness and not rank.left:
                self._end(CauseKind.SILENT, rank.member,
                          f"gave no sign of life for {self._liveness:g} s (stopped, frozen or cut off)")
                return
        if not self.all_connected or any(map(self._is_worker, self.members)):
            self._no_worker_since = now
        elif now - self._no_worker_since > self._start_timeout:
            workers = ", ".join(self._describe(rank.member) for number, rank in sorted(self.ranks.lost.items())
                                if self._is_worker(number))
            self.ranks.end(Cause(CauseKind.LOST, None, "", None, f"all workers were lost ({workers}) and none rejoined"
                                 f" within {self._start_timeout:g} s (HVKERAS_START_TIMEOUT)"))

    def _end(self, kind: CauseKind, member: Member, description: str) -> None:
        self.ranks.end(Cause(kind, None, member.host, member.pid, f"{self._describe(member)} {description}"))

    def _describe(self, member: Member) -> str:
        return f"{self.task_of(member.number)} on {member.host} (pid {member.pid})"

    def _is_worker(self, number: int) -> bool:
        return self.task_of(number).startswith("worker ")


class ClusterMembership:
    """The chief's server of the control channel.

    Args:
        launch: The cluster, and the chief's task in it.
        port: The port, or 0 for a free one.
        on_end: Called once, from the server's thread, with the cause when the job ends early.
    """

    def __init__(self, launch: Launch, settings: Settings, secret: bytes, host: str, port: int,
                 on_end: Callable[[Cause], None]) -> None:
        self._launch = launch
        self._start_timeout = settings.start_timeout
        self._handler = ClusterHandler(launch, settings, on_end)
        self._server = MessageServer(self._handler, secret, host, port, launch.size)
        self.address: tuple[str, int] = self._server.address

    def start(self) -> tuple[str, int]:
        """Start serving, and return the address that tasks connect to."""
        return self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    def fail(self, cause: Cause) -> None:
        """End the job with a cause; may be called from any thread."""
        self._server.call(self._handler.ranks.end, cause)

    @property
    def cause(self) -> Cause | None:
        """Cause of an early end of the job; None while it runs."""
        return self._handler.ranks.cause

    def wait_for_all(self) -> None:
        """Wait until all workers and parameter servers have connected.

        Raises:
            PeerError: Tasks did not connect in time, and the message names them, or a connected task was lost.
        """
        waiting = Waiting(self._start_timeout)
        while missing := [number for number in range(1, self._launch.size) if number not in self._handler.members]:
            if self.cause is not None:
                raise PeerError(f"The job ended: {self.cause.sentence()}")
            waiting.check(some_of([self._launch.task_name(number) for number in missing]), "not connected to the chief")
            time.sleep(_POLL_INTERVAL)
        self._handler.all_connected = True
