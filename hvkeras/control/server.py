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
from hvkeras.control.relayed_ranks import FIRST_RELAY, Relay, from_runs
from hvkeras.errors import summary
from hvkeras.host.console import format_ranks, some_of
from hvkeras.host.network import host_identity

BEAT = 1.0  # seconds between two heartbeats to ranks
SECONDARY_GRACE = 2.0  # seconds to wait for the root cause when a rank only reports its engine's error
JOINT_EXIT = 2.0  # seconds within which scripts with the same work end, and then their processes
RECONNECT_WITHIN = 10.0  # seconds for a rank to reconnect that closed its connection before it was admitted
ANSWER_GRACE = 2.0  # seconds for ranks to report their location


class ControlHandler(Handler):
    """Handler of the ranks of one job.

    Args:
        size: The number of ranks to expect.
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
        self._unconfirmed: set[int] = set()  # admitted ranks that have not confirmed it
        self._reconnecting: dict[int, tuple[RankState, int]] = {}  # ranks that may reconnect, and their remaining ticks
        self._timed_out: Cause | None = None  # the timeout for which other ranks must report their locations

    # Ranks join and leave.

    def on_join(self, member: Member) -> str:
        """Admit a relay or a rank; a rank that does not belong to the job ends it."""
        if member.number <= FIRST_RELAY:
            self.ranks.relays[member.number] = Relay(member, self.members)
            return ""
        return self._admit(member, None)

    def _admit(self, member: Member, relay: Relay | None) -> str:
        """Admit a rank, or return the reason for its rejection."""
        ranks, refusal, number = self.ranks, "", member.number
        if member.size != ranks.size:
            refusal = (f"rank {number} on {member.host} was started as one of {member.size} ranks, the others as one"
                       f" of {ranks.size}")
        elif number in ranks.present:
            first = ranks.present[number].member
            refusal = (f"two processes claim rank {number}: pid {first.pid} on {first.host} and pid {member.pid} on"
                       f" {member.host}; give each process its own index")
        if refusal:
            ranks.end(Cause(CauseKind.SETUP, None, "", None, refusal))
        elif ranks.cause is not None:
            refusal = ranks.cause.sentence()
        else:
            ranks.present[number] = RankState(member, relay)
            self._unconfirmed.add(number)
            self._reconnecting.pop(number, None)
        return refusal

    def on_leave(self, member: Member) -> None:
        """Mark a rank as lost when its connection ends, unless it was not yet admitted: then it may reconnect."""
        if (relay := self.ranks.relays.pop(member.number, None)) is not None:
            self._lose_relay(relay)
            return
        rank = self.ranks.present.pop(member.number)
        if rank.relay is not None:
            rank.relay.ranks.discard(member.number)
        self._unconfirmed.discard(member.number)
        self._coordinator.on_leave(member.number)
        if member.arrived:
            self._count_as_lost(rank)
        else:  # it closes the connection if the server answers too late
            self._reconnecting[member.number] = rank, int(RECONNECT_WITHIN / TICK)

    def _count_as_lost(self, rank: RankState) -> None:
        self.ranks.lost[rank.member.number] = rank
        self._count_ends()
        if not rank.left and not rank.exit_reported:
            self.ranks.end_with(CauseKind.LOST, rank.member, ENDED)
        self.ranks.check_exit_reports()

    def on_message(self, member: Member, message: Message) -> None:
        """Handle a message from a rank, or from several behind a relay."""
        if isinstance(message, Relayed):
            if (relay := self.ranks.relays.get(member.number)) is not None:
                for runs, body in zip(message.ranks, message.bodies, strict=True):
                    self._on_relayed(relay, from_runs(runs), decode(body))
            return
        rank = self.ranks.present.get(member.number)
        if rank is not None and rank.member is member:  # else it has reconnected
            self._handle(rank, message)

    def _on_relayed(self, relay: Relay, numbers: Sequence[int], message: Message) -> None:
        """Handle a message that each of these ranks behind a relay has sent."""
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
        """Mark the ranks behind a disconnected relay as lost, and report the relay as the cause."""
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
        member = rank.member
        match message:
            case Arrived():
                self._unconfirmed.discard(member.number)
                self._close_when_complete()
            case ClockQuestion():
                member.send(ClockAnswer(message.asked, time.time(), self._host))
            case Failed():
                self._handle_failure(rank, message)
            case Location():
                rank.outside, rank.doing = message.outside, message.doing
                self._fail_when_all_answered()
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
        if len(self.ranks.present) == self.ranks.size and not self._unconfirmed:
            self.members.serving.stop_listening()  # immediately: an engine may need the port of TF_CONFIG

    def terminate(self, cause: Cause) -> None:
        """End the job on request, but give ranks the time to save their training state."""
        if len(self.ranks.present.keys() | self.ranks.lost.keys()) < self.ranks.size:
            self.ranks.end(cause)  # ranks that are starting have nothing to save
        else:
            self.ranks.broadcast(Terminate(cause))

    def _count_ends(self) -> None:
        """Notify all ranks when the last script has ended: a rank that does not exit then keeps the job alive."""
        ranks = self.ranks
        if self._all_ended_at is None and len(ranks.present.keys() | ranks.lost.keys()) == ranks.size and all(
                rank.script_ended for rank in ranks.present.values()):
            self._all_ended_at = time.monotonic()
            self.ranks.broadcast(AllScriptsEnded())

    # Failures.

    def on_fault(self, what: str, error: BaseException) -> None:
        """End the job because of an internal error."""
        self.ranks.end(Cause(CauseKind.EXCEPTION, None, "", None, f"the control channel's server failed {what} with"
                             f" {summary(error)}", "".join(traceback.format_exception(error))))

    def _handle_failure(self, rank: RankState, message: Failed) -> None:
        rank.failed = True
        if message.secondary:
            self.members.serving.call_later(SECONDARY_GRACE, self._end_unless_known, message.cause)
        else:
            self.ranks.end(message.cause)

    def _end_unless_known(self, cause: Cause) -> None:
        """End the job for a failure that looked secondary, if no rank has reported a root cause."""
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
                self.members.serving.call_later(ANSWER_GRACE, self._fail_late_ranks)
        else:
            self.ranks.end(cause)

    def _not_failed(self) -> list[RankState]:
        return [rank for rank in self.ranks.present.values() if not rank.failed]

    def _fail_when_all_answered(self) -> None:
        if self._timed_out is not None and all(rank.outside is not None for rank in self._not_failed()):
            self._fail_late_ranks()

    def _fail_late_ranks(self) -> None:
        """End the job, naming the ranks missing from an uncounted collective in which another rank timed out."""
        cause, others = self._timed_out, self._not_failed()
        assert cause is not None
        late = [rank for rank in others if rank.outside] or others
        waited = (f"not entered a collective in which rank {cause.rank} has waited longer than HVKERAS_STALL_SHUTDOWN"
                  f" allows ({self.deadlines.stall_shutdown:g} s)")
        locations = some_of([f"rank {rank.member.number} at {rank.outside or 'a call of TensorFlow'}" for rank in late])
        if len(late) == 1:
            where = f": it is at {late[0].outside}" if late[0].outside else ""
            self.ranks.end_with(CauseKind.STALLED, late[0].member, f"has {waited}{where}")
        else:
            several = Cause(CauseKind.STALLED, None, "", None, f"ranks have {waited}: {locations}")
            self.ranks.end(several if late else cause)

    # Time-dependent checks.

    def on_tick(self, now: float) -> None:
        """Check all ranks, and send them heartbeats."""
        if self.ranks.cause is None:
            self._check_ranks(now)
        # ticks, since time for which the server is stopped does not count
        for number, (rank, ticks) in list(self._reconnecting.items()):
            self._reconnecting[number] = rank, ticks - 1
            if ticks <= 1:
                del self._reconnecting[number]
                self._count_as_lost(rank)
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self.ranks.broadcast(Heartbeat())
            self._coordinator.send_missing()

    def on_frozen(self, now: float) -> None:
        """Restart the liveness timeout of all ranks, including those behind relays."""
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
            # A relay that has stopped forwards nothing, and is to be named itself as soon as its own timeout is over.
            relay_is_late = rank.relay is not None and now - rank.relay.member.seen > 1.5 * BEAT
            if now - rank.member.seen > liveness and not rank.left and not relay_is_late:
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
        """Report a rank that has left the job but still runs, since it can no longer report that itself."""
        waited = 0.0 if self._all_ended_at is None else now - self._all_ended_at
        limits = self.deadlines
        for number, rank in list(self.ranks.present.items()):
            if not rank.left or number == self.ranks.own:
                continue
            error = f"has left the job, but its process has not ended, {waited:.0f} s after its script did"
            # The process has no thread left that could end the job earlier.
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
    """Server of one job's control channel, in its own thread.

    Args:
        size: The number of ranks to expect.
        secret: The job's secret, with which every rank must authenticate.
        host: The address to listen on: the loopback or one chosen interface.
        port: The port, or 0 for a free one.
        on_end: Called once from the server's thread with the cause when the job ends early.
        on_warning: Called from the server's thread with one line about a long wait.
        on_note: Called from the server's thread with one line about unauthenticated connections.

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
        """Start serving.

        Returns:
            The host and port that ranks connect to.
        """
        return self._server.start()

    def stop(self) -> None:
        """Stop serving, close the socket and end the thread."""
        self._server.stop()

    @property
    def cause(self) -> Cause | None:
        """The reason why the job ends early; None while it runs."""
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
        """Return the connected ranks from which no message has arrived for this many seconds."""
        now = time.monotonic()
        present = list(self._handler.ranks.present.items())
        return frozenset(number for number, rank in present if now - rank.member.seen > seconds)

    def fail(self, cause: Cause) -> None:
        """End the job from outside, for example when a launcher detects that a process has died."""
        self._server.call(self._handler.ranks.end, cause)

    def terminate(self, cause: Cause) -> None:
        """End the job on request, but give ranks the time to save their training state."""
        self._server.call(self._handler.terminate, cause)

    def ask_locations(self) -> None:
        """Request that every rank print its location and stack."""
        self._server.call(self._handler.ranks.broadcast, Locate())

    def wait_for_exits(self, rank: int, held: bool) -> None:
        """Wait until every rank whose script has ended has exited, or the job ends because one does not.

        It stops waiting for ranks whose scripts clearly continue. It also stops soon for ranks that have left: what
        ends their processes, such as MPI's own exit, may in turn wait for this one.

        Args:
            held: True if MPI's exit holds this process until the others end, so that no wait is needed here.
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
