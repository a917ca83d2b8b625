"""The control channel's server: monitors all ranks, coordinates them, and determines causes of failure.

Connections are those of `MessageServer`, which calls `ControlHandler.on_leave` when one has ended.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

from hvkeras.control.cause import ENDED, Cause, CauseKind, silent_for
from hvkeras.control.coordinator import Coordinator
from hvkeras.control.handler import TICK, Handler, Member, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import (
    AllScriptsEnded,
    Arrived,
    ClockAnswer,
    ClockQuestion,
    Deadlines,
    ExitReported,
    Failed,
    Heartbeat,
    Hello,
    LeftJob,
    Locate,
    Location,
    Message,
    RankGone,
    Registered,
    Rejected,
    Relayed,
    ScriptEnded,
    Terminate,
    Welcome,
    decode,
)
from hvkeras.control.ranks import Ranks, RankState
from hvkeras.control.relayed import FIRST_RELAY, Relay, from_runs
from hvkeras.host.console import format_ranks, some_of, summary
from hvkeras.host.network import host_identity

BEAT = 1.0  # seconds between two heartbeats to ranks
SECONDARY_GRACE = 2.0  # seconds to wait for the root cause when a rank only reports its engine's error
JOINT_EXIT = 2.0  # seconds within which scripts that do the same work end, and then their processes
BACK_WITHIN = 10.0  # seconds for a rank to come again that has given up a connection before it was admitted
ANSWER_GRACE = 2.0  # seconds that ranks have to report their location


class ControlHandler(Handler):
    """Decides about the ranks of one job.

    Args:
        size: The number of ranks to expect.
        deadlines: The time limits.
        on_end: Called once with the cause when the job ends early.
        on_warning: Called with one line about a long wait.
    """

    def __init__(self, size: int, deadlines: Deadlines, on_end: Callable[[Cause], None] | None = None,
                 on_warning: Callable[[str], None] | None = None) -> None:
        self.members = Members()
        self.deadlines = deadlines
        self.ranks: Ranks = Ranks(self.members, size, deadlines.exit_grace, on_end)
        self._coordinator = Coordinator(self.ranks, deadlines)
        self._on_warning = on_warning
        self._host = host_identity()
        self._next_beat = 0.0
        self._all_ended_at: float | None = None
        self._next_exit_warning: dict[int, float] = {}
        self._arriving: set[int] = set()  # ranks that were admitted, and may not know it
        self._awaited: dict[int, tuple[RankState, int]] = {}  # ranks that may come again, and their ticks left
        self._timed_out: Cause | None = None  # the failure of a rank for which others are asked for their locations

    # Ranks come and go.

    def on_join(self, member: Member) -> str:
        """Admits a relay, or a rank, unless it does not belong to the job, which ends then."""
        if member.number <= FIRST_RELAY:
            self.ranks.relays[member.number] = Relay(member, self.members)
            return ""
        return self._admit(member, None)

    def _admit(self, member: Member, relay: Relay | None) -> str:
        """Admits a rank; returns why not."""
        ranks, refusal, number = self.ranks, "", member.number
        if member.size != ranks.size:
            refusal = (f"rank {number} on {member.host} was started as one of {member.size} ranks, the others as one"
                       f" of {ranks.size}")
        elif number in ranks.present:
            first = ranks.present[number].member
            refusal = (f"two processes claim rank {number}: pid {first.pid} on {first.host} and pid {member.pid} on"
                       f" {member.host}; give each process an index of its own")
        if refusal:
            ranks.end(Cause(CauseKind.SETUP, None, "", None, refusal))
        elif ranks.cause is not None:
            refusal = ranks.cause.sentence()
        else:
            ranks.present[number] = RankState(member, relay)
            self._arriving.add(number)
            self._awaited.pop(number, None)
        return refusal

    def on_leave(self, member: Member) -> None:
        """Counts a rank as lost whose connection ends; one that does not know that it was admitted may come again."""
        if (relay := self.ranks.relays.pop(member.number, None)) is not None:
            self._lose_relay(relay)
            return
        rank = self.ranks.present.pop(member.number)
        if rank.relay is not None:
            rank.relay.ranks.discard(member.number)
        self._arriving.discard(member.number)
        self._coordinator.on_leave(member.number)
        if member.arrived:
            self._count_as_lost(rank)
        else:  # it gives up the connection if the server answers too late
            self._awaited[member.number] = rank, int(BACK_WITHIN / TICK)

    def _count_as_lost(self, rank: RankState) -> None:
        self.ranks.lost[rank.member.number] = rank
        self._count_ends()
        if not rank.left and not rank.exit_reported:
            self.ranks.end_with(CauseKind.LOST, rank.member, ENDED)
        self.ranks.check_exit_reports()

    def on_message(self, member: Member, message: Message) -> None:
        """Handles a message from a rank, or from several behind a relay."""
        if isinstance(message, Relayed):
            if (relay := self.ranks.relays.get(member.number)) is not None:
                for runs, body in zip(message.ranks, message.bodies, strict=True):
                    self._on_relayed(relay, from_runs(runs), decode(body))
            return
        rank = self.ranks.present.get(member.number)
        if rank is not None and rank.member is member:  # else it has come again
            self._handle(rank, message)

    def _on_relayed(self, relay: Relay, numbers: Sequence[int], message: Message) -> None:
        """Handles a message that ranks behind a relay have sent, each by itself."""
        if isinstance(message, Hello):
            member = relay.admit(message)
            if reason := self._admit(member, relay):
                member.send(Rejected(reason))
            else:
                relay.ranks.add(member.number)
                member.send(Welcome())
            return
        present = self.ranks.present
        ranks = [rank for number in numbers if (rank := present.get(number)) is not None and rank.relay is relay]
        for rank in ranks:
            rank.member.seen, rank.member.arrived = relay.member.seen, True
        if isinstance(message, Heartbeat):
            self._coordinator.count([rank.member.number for rank in ranks], message)
            return
        for rank in ranks:
            if isinstance(message, RankGone):
                self.on_leave(rank.member)
            else:
                self._handle(rank, message)

    def _lose_relay(self, relay: Relay) -> None:
        """Counts the ranks behind a relay as lost whose connection ends, and names the relay."""
        behind = [self.ranks.present[number] for number in sorted(relay.ranks)]
        if any(rank.member.arrived and not (rank.left or rank.exit_reported) for rank in behind):
            self._end_with_relay(CauseKind.LOST, relay, ENDED)
        for rank in behind:
            self.on_leave(rank.member)

    def _end_with_relay(self, kind: CauseKind, relay: Relay, error: str) -> None:
        host, pid = relay.member.host, relay.member.pid
        text = f"the relay on {host} (pid {pid}), which connects {format_ranks(sorted(relay.ranks))}, {error}"
        self.ranks.end(Cause(kind, None, host, pid, text))

    def _handle(self, rank: RankState, message: Message) -> None:
        """Handles a message from a rank."""
        member = rank.member
        match message:
            case Arrived():
                self._arriving.discard(member.number)
                self._close_when_complete()
            case ClockQuestion():
                member.send(ClockAnswer(message.asked, time.time(), self._host))
            case Failed():
                self._handle_failure(rank, message)
            case Location():
                rank.outside, rank.doing = message.outside, message.doing
                self._blame_when_all_answered()
            case ExitReported():
                rank.exit_reported = True
                self.ranks.check_exit_reports()
            case Registered() | LeftJob():
                rank.left = isinstance(message, LeftJob)
                self._coordinator.set_left(rank)
                self.ranks.check_exit_reports()
            case ScriptEnded():
                rank.script_ended = True
                self._count_ends()
            case Deadlines():
                self.deadlines, self.ranks.exit_grace = message, message.exit_grace
                self._coordinator.set_deadlines(message)
            case _:
                self._coordinator.on_message(rank, message)

    def _close_when_complete(self) -> None:
        if len(self.ranks.present) == self.ranks.size and not self._arriving:
            self.members.serving.stop_listening()  # immediately: an engine may need the port of TF_CONFIG

    def terminate(self, cause: Cause) -> None:
        """Lets the job end from outside, but gives ranks the time to save what they train."""
        if len(self.ranks.present.keys() | self.ranks.lost.keys()) < self.ranks.size:
            self.ranks.end(cause)  # ranks that are starting have nothing to save
        else:
            self.ranks.broadcast(Terminate(cause))

    def _count_ends(self) -> None:
        """Notifies all ranks when the last script has ended: a rank that does not exit then keeps the job alive."""
        ranks = self.ranks
        if self._all_ended_at is None and len(ranks.present.keys() | ranks.lost.keys()) == ranks.size and all(
                rank.script_ended for rank in ranks.present.values()):
            self._all_ended_at = time.monotonic()
            self.ranks.broadcast(AllScriptsEnded())

    # Failures.

    def on_fault(self, what: str, error: BaseException) -> None:
        """Ends the job for a fault of hvkeras."""
        self.ranks.end(Cause(CauseKind.EXCEPTION, None, "", None, f"the control channel's server failed {what} with"
                             f" {summary(error)}", "".join(traceback.format_exception(error))))

    def _handle_failure(self, rank: RankState, message: Failed) -> None:
        rank.failed = True
        if message.secondary:
            self.members.serving.call_later(SECONDARY_GRACE, self._end_unless_known, message.cause)
        else:
            self.ranks.end(message.cause)

    def _end_unless_known(self, cause: Cause) -> None:
        """Ends the job for a failure that looked like a consequence of another one, which nobody has reported."""
        if self.ranks.cause is not None:
            return
        if left := self.ranks.leavers():
            where = self._coordinator.waits.waited_for_in(cause.rank, left[0].member.number)
            self.ranks.end_with(CauseKind.LEFT, left[0].member, f"left the job normally while rank {cause.rank} "
                                + (f"is still waiting for it in {where}" if where else "still needed it"))
        elif cause.kind is CauseKind.TIMEOUT:
            if self._timed_out is None:
                self._timed_out = cause
                for rank in self._not_failed():
                    rank.outside = None
                    rank.member.send(Locate())
                self.members.serving.call_later(ANSWER_GRACE, self._blame_late_ranks)
        else:
            self.ranks.end(cause)

    def _not_failed(self) -> list[RankState]:
        return [rank for rank in self.ranks.present.values() if not rank.failed]

    def _blame_when_all_answered(self) -> None:
        if self._timed_out is not None and all(rank.outside is not None for rank in self._not_failed()):
            self._blame_late_ranks()

    def _blame_late_ranks(self) -> None:
        """Ends the job for the ranks missing from a collective that nobody counts, as one has given up waiting."""
        cause, others = self._timed_out, self._not_failed()
        assert cause is not None
        late = [rank for rank in others if rank.outside] or others
        waited = (f"not entered a collective in which rank {cause.rank} has waited longer than HVKERAS_STALL_SHUTDOWN"
                  f" allows ({self.deadlines.stall_shutdown:g} s)")
        indices = some_of([f"rank {rank.member.number} at {rank.outside or 'a call of TensorFlow'}" for rank in late])
        if len(late) == 1:
            where = f": it is at {late[0].outside}" if late[0].outside else ""
            self.ranks.end_with(CauseKind.STALLED, late[0].member, f"has {waited}{where}")
        else:
            several = Cause(CauseKind.STALLED, None, "", None, f"ranks have {waited}: {indices}")
            self.ranks.end(several if late else cause)

    # What time decides.

    def on_tick(self, now: float) -> None:
        """Checks all ranks, and gives them a sign of life."""
        if self.ranks.cause is None:
            self._check_ranks(now)
        for number, (rank, ticks) in list(self._awaited.items()):  # the time for which the server stands still is free
            self._awaited[number] = rank, ticks - 1
            if ticks <= 1:
                del self._awaited[number]
                self._count_as_lost(rank)
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self.ranks.broadcast(Heartbeat())
            self._coordinator.send_missing()

    def on_frozen(self, now: float) -> None:
        """Forgives all ranks, and those behind relays, that this process itself was stopped."""
        super().on_frozen(now)
        for rank in self.ranks.present.values():
            rank.member.seen = now

    def _check_ranks(self, now: float) -> None:
        liveness = self.deadlines.liveness
        for relay in self.ranks.relays.values():
            if now - relay.member.seen > liveness and not all(self.ranks.present[each].left for each in relay.ranks):
                self._end_with_relay(CauseKind.SILENT, relay, silent_for(liveness))
                return
        for rank in list(self.ranks.present.values()):
            if now - rank.member.seen > liveness and not rank.left:
                self.ranks.end_with(CauseKind.SILENT, rank.member, silent_for(liveness))
                return
        self._check_exits(now)
        for finding in self._coordinator.check(now):
            found = None if finding.rank is None else self.ranks.find(finding.rank)
            if finding.kind is None:
                self._warn(finding.text)
                if found is not None:
                    found.member.send(Locate(finding.text))
                continue
            cause = Cause(finding.kind, finding.rank, found.member.host if found else "",
                          found.member.pid if found else None, finding.text)
            if finding.kind is CauseKind.STALLED and found is not None:
                found.member.send(Locate(cause.sentence()))
            self.ranks.end(cause)
            return

    def _check_exits(self, now: float) -> None:
        """Reports a rank that has left the job but still runs, since it can no longer report that itself."""
        waited = 0.0 if self._all_ended_at is None else now - self._all_ended_at
        limits = self.deadlines
        for number, rank in list(self.ranks.present.items()):
            if not rank.left or number == self.ranks.own:
                continue
            error = f"has left the job, but its process has not ended, {waited:.0f} s after its script did"
            # The process has no thread left that could end it earlier.
            if limits.stall_shutdown and waited >= limits.stall_shutdown + limits.liveness:
                self.ranks.end_with(CauseKind.STALLED, rank.member,
                                    f"{error} (HVKERAS_STALL_SHUTDOWN sets the limit)")
                return
            if limits.stall_warning and waited >= self._next_exit_warning.get(number, limits.stall_warning):
                self._next_exit_warning[number] = 2.0 * waited
                member = rank.member
                self._warn(Cause(CauseKind.STALLED, number, member.host, member.pid, error).sentence())

    def _warn(self, text: str) -> None:
        if text and self._on_warning is not None:
            self._on_warning(text)


class ControlServer:
    """Serves one job's control channel from a thread of its own.

    Args:
        size: The number of ranks to expect.
        secret: The job's secret, which every rank must prove.
        host: The address to listen on: the loopback or one chosen interface.
        port: The port, or 0 for a free one.
        deadlines: The time limits.
        on_end: Called once, from the server's thread, with the cause when the job ends early.
        on_warning: Called, from the server's thread, with one line about a long wait.
        on_note: Called, from the server's thread, with one line about unauthenticated connections.

    Raises:
        MachineError: The server cannot listen on the address.
    """

    def __init__(
        self,
        size: int,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        deadlines: Deadlines | None = None,
        on_end: Callable[[Cause], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._handler = ControlHandler(size, deadlines or Deadlines(), on_end, on_warning)
        self._server = MessageServer(self._handler, secret, host, port, size, on_note=on_note)
        self.size = size
        self.address: tuple[str, int] = self._server.address

    def start(self) -> tuple[str, int]:
        """Starts serving.

        Returns:
            The host and port that ranks connect to.
        """
        return self._server.start()

    def stop(self) -> None:
        """Stops serving, closes the socket and ends the thread."""
        self._server.stop()

    @property
    def cause(self) -> Cause | None:
        """Why the job ends early; None as long as it does not."""
        return self._handler.ranks.cause

    @property
    def deadlines(self) -> Deadlines:
        """The time limits in force."""
        return self._handler.deadlines

    @property
    def connected(self) -> frozenset[int]:
        """The ranks that are connected now."""
        return frozenset(list(self._handler.ranks.present))

    @property
    def ever_connected(self) -> frozenset[int]:
        """The ranks that have ever been connected."""
        return self.connected | frozenset(list(self._handler.ranks.lost))

    def silent_for(self, seconds: float) -> frozenset[int]:
        """Returns the connected ranks that have given no sign of life for so many seconds."""
        now = time.monotonic()
        present = list(self._handler.ranks.present.items())
        return frozenset(number for number, rank in present if now - rank.member.seen > seconds)

    def fail(self, cause: Cause) -> None:
        """Ends the job from outside, for example when a launcher sees a process die."""
        self._server.call(self._handler.ranks.end, cause)

    def terminate(self, cause: Cause) -> None:
        """Lets the job end from outside, but gives ranks the time to save what they train.

        Args:
            cause: Why it ends.
        """
        self._server.call(self._handler.terminate, cause)

    def ask_locations(self) -> None:
        """Makes every rank print its location and stack."""
        self._server.call(self._handler.ranks.broadcast, Locate())

    def wait_for_exits(self, rank: int, held: bool) -> None:
        """Waits until every rank whose script has ended has exited, or the job ends because one does not.

        It stops waiting for ranks whose scripts continue on their own, once it is clear that they do, and soon for
        ranks that have left: what ends their processes, such as MPI's own exit, may in turn wait for this one.

        Args:
            rank: The rank of this process.
            held: Whether MPI's exit holds this process until the others end, so that nothing is waited for here.
        """
        self._handler.ranks.own = rank
        deadline, left = 0.0, -1
        while self.cause is None:
            others = [other for number, other in list(self._handler.ranks.present.items()) if number != rank]
            if left != (left := sum(other.left for other in others)):
                deadline = time.monotonic() + JOINT_EXIT
            if left == len(others) and (held or not others):
                return
            if time.monotonic() > deadline and not any(other.script_ended and not other.left for other in others):
                return
            time.sleep(0.02)
