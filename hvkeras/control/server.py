"""The control channel's server: monitors all ranks, relays what they agree on, and determines causes of failure."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable

from hvkeras.control import wire
from hvkeras.control.cause import Cause
from hvkeras.control.connections import Member
from hvkeras.control.relay import Deadlines, Relay
from hvkeras.host.error_text import summary
from hvkeras.host.network import host_identity

TICK = 0.25  # seconds between two checks of the ranks
FROZEN = 2.0  # a tick later than this means that this process itself was stopped, so no rank is late
SECONDARY_GRACE = 2.0  # seconds to wait for the root cause when a rank only reports its engine's error
JOINT_EXIT = 2.0  # seconds within which scripts that do the same work end, and then their processes
BACK_WITHIN = 10.0  # seconds for a rank to come again that has given up a connection before it was admitted
ANSWER_GRACE = 2.0  # seconds that ranks have to report their location


class ControlServer(Relay):
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

    closes_when_complete = True  # nobody else may connect once all ranks have

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
        super().__init__(size, secret, host, port, deadlines or Deadlines())
        self.cause: Cause | None = None
        self._host = host_identity()
        self._on_end = on_end
        self._on_warning = on_warning
        self._on_note = on_note
        self._own_rank: int | None = None  # the rank of this process, once it waits for the others to exit
        self._all_ended_at: float | None = None
        self._next_exit_warning: dict[int, float] = {}

    def fail(self, cause: Cause) -> None:
        """Ends the job from outside, for example when a launcher sees a process die."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, cause)

    def tell_to_end(self, cause: Cause) -> None:
        """Lets the job end from outside, but gives ranks the time to save what they train.

        Args:
            cause: Why it ends.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell_to_end, cause)

    def silent_for(self, seconds: float) -> frozenset[int]:
        """Returns the connected ranks that have given no sign of life for so many seconds."""
        now = time.monotonic()
        return frozenset(rank for rank, member in list(self._members.items()) if now - member.seen > seconds)

    def wait_for_exits(self, rank: int, held: bool) -> None:
        """Waits until every rank whose script has ended has exited, or the job ends because one does not.

        It stops waiting for ranks whose scripts continue on their own, once it is clear that they do, and soon for
        ranks that have left: what ends their processes, such as MPI's own exit, may in turn wait for this one.

        Args:
            rank: The rank of this process.
            held: Whether MPI's exit holds this process until the others end, so that nothing is waited for here.
        """
        self._own_rank = rank
        deadline, left = 0.0, -1
        while self.cause is None:
            others = [member for other, member in list(self._members.items()) if other != rank]
            if left != (left := sum(member.left for member in others)):
                deadline = time.monotonic() + JOINT_EXIT
            if left == len(others) and (held or not others):
                return
            if time.monotonic() > deadline and not any(member.over and not member.left for member in others):
                return
            time.sleep(0.02)

    def ask_locations(self) -> None:
        """Makes every rank print its location and stack."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._broadcast, {"type": "where"})

    # The methods below run in the server's thread.

    def _admit(self, hello: wire.Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        rank, size, host, pid = int(hello["rank"]), int(hello["size"]), str(hello["host"]), int(hello["pid"])
        member = Member(rank, host, pid, writer, seal, time.monotonic())
        refusal = ""
        if size != self.size:
            refusal = f"rank {rank} on {host} was started as one of {size} ranks, the others as one of {self.size}"
        elif rank in self._members:
            first = self._members[rank]
            refusal = (f"two processes claim rank {rank}: pid {first.pid} on {first.host} and pid {pid} on {host};"
                       " give each process an index of its own")
        if refusal or self.cause is not None:
            member.send({"type": "refused", "reason": refusal or (self.cause.sentence() if self.cause else "")})
            if refusal:
                self._end(Cause("setup", None, "", None, refusal))
            return None
        self._members[rank] = member
        member.send({"type": "welcome"})
        return member

    def _confirm(self, member: Member) -> None:
        super()._confirm(member)
        arrived = sum(other.arrived for other in self._members.values())
        if self.closes_when_complete and arrived == self.size and self._listening is not None:
            self._listening.close()  # immediately: the port may be the one that TF_CONFIG gives to the engine

    def _on_fault(self, what: str, error: BaseException) -> None:
        super()._on_fault(what, error)
        text = "".join(traceback.format_exception(error))
        self._end(Cause("exception", None, "", None,
                        f"the control channel's server failed {what} with {summary(error)}", text))

    def _handle(self, member: Member, message: wire.Message) -> None:
        member.seen = time.monotonic()
        kind = message["type"]
        if kind == "beat":
            self._count(member, message)
        elif kind == "clock":
            member.send({"type": "clock", "asked": message["asked"], "time": time.time(), "host": self._host})
        elif kind == "put":
            self._gather(member, message["key"], message["value"])
        elif kind == "failed":
            self._handle_failure(member, Cause.from_message(message["cause"]), message["secondary"])
        elif kind == "here":
            member.outside, member.doing = message["outside"], message["doing"]
        elif kind == "ended":
            member.ended = True
        else:
            self._handle_work(member, message)

    def _handle_work(self, member: Member, message: wire.Message) -> None:
        kind = message["type"]
        if kind in ("join", "leave"):
            self._set_membership(member, kind == "leave")
        elif kind == "over":
            member.over = True
            self._count_ends()
        elif kind == "joined":
            self._join(member)
        elif kind == "deadlines":
            self._set_deadlines(Deadlines(**message["seconds"]))
        elif kind == "noted":
            self._confirm_refusal(member, message)
        elif kind == "forgotten":
            self._participation.forget(self._waits.forgotten(member.rank, message["asked"], message["keys"]))
        elif kind == "stop":
            self._send_requests(self._stops.ask(member.rank, message["fit"], message["ranks"]))
        elif kind == "come to":
            self._send_requests(self._stops.receive(member.rank, message["fit"], message["executions"]))

    def _tell_to_end(self, cause: Cause) -> None:
        if len(self.ever_connected) < self.size:
            self._end(cause)  # ranks that are starting have nothing to save
        else:
            self._broadcast({"type": "told", "cause": cause.to_message()})

    def _count_ends(self) -> None:
        """Notifies all ranks when the last script has ended: a rank that does not exit then keeps the job alive."""
        if self._all_ended_at is None and all(
                self._members[rank].over if rank in self._members else rank in self._lost for rank in range(self.size)):
            self._all_ended_at = time.monotonic()
            self._broadcast({"type": "all over"})

    def _handle_failure(self, member: Member, cause: Cause, secondary: bool) -> None:
        member.failed = True
        if secondary:
            self._schedule(self._end_unless_known(cause))
        else:
            self._end(cause)

    def _lose(self, member: Member) -> None:
        if self._members.get(member.rank) is not member:
            return
        del self._members[member.rank]
        if member.arrived:
            self._count_as_lost(member)
        else:
            self._schedule(self._lose_unless_back(member))

    async def _lose_unless_back(self, member: Member) -> None:
        """Waits for a rank to come again that gave up a connection: it does so if this server answers too late."""
        for _ in range(int(BACK_WITHIN / TICK)):  # time in which the server stands still does not count
            await asyncio.sleep(TICK)
            if member.rank in self._members or member.rank in self._lost:
                return
        self._count_as_lost(member)

    def _count_as_lost(self, member: Member) -> None:
        self._lost[member.rank] = member
        self._count_ends()
        if not member.left and not member.ended and self.cause is None:
            self._end(Cause("lost", member.rank, member.host, member.pid,
                            "ended unexpectedly (killed, crashed, or out of memory)"))

    async def _end_unless_known(self, cause: Cause) -> None:
        deadline = time.monotonic() + SECONDARY_GRACE
        while time.monotonic() < deadline and self.cause is None:
            await asyncio.sleep(0.05)
        left = [self._members.get(rank) or self._lost[rank] for rank in range(self.size)
                if (rank in self._members and self._members[rank].left) or
                (rank in self._lost and self._lost[rank].left)]
        if left and self.cause is None:
            where = self._waits.waited_for_in(cause.rank, left[0].rank)
            cause = Cause("left", left[0].rank, left[0].host, left[0].pid,
                          f"left the job normally while rank {cause.rank} "
                          + (f"is still waiting for it in {where}" if where else "still needed it"))
        if cause.kind == "timeout" and self.cause is None:
            cause = await self._blame_late_ranks(cause)
        self._end(cause)

    async def _blame_late_ranks(self, cause: Cause) -> Cause:
        """Finds the ranks missing from a collective that nobody counts, after a rank has given up waiting in it."""
        others = [member for member in self._members.values() if not member.failed]
        for member in others:
            member.outside = None
            member.send({"type": "where"})
        deadline = time.monotonic() + ANSWER_GRACE
        while time.monotonic() < deadline and any(member.outside is None for member in others):
            await asyncio.sleep(0.05)
        late = [member for member in others if member.outside] or others
        waited = (f"not entered a collective in which rank {cause.rank} has waited longer than HVKERAS_STALL_SHUTDOWN"
                  f" allows ({self.deadlines.stall_shutdown:g} s)")
        if len(late) == 1:
            where = f": it is at {late[0].outside}" if late[0].outside else ""
            return Cause("stalled", late[0].rank, late[0].host, late[0].pid, f"has {waited}{where}")
        places = ", ".join(f"rank {member.rank} at {member.outside or 'a call of TensorFlow'}" for member in late)
        return Cause("stalled", None, "", None, f"ranks have {waited}: {places}") if late else cause

    def _end(self, cause: Cause) -> None:
        if self.cause is not None:
            return
        self.cause = cause
        self._broadcast({"type": "end", "cause": cause.to_message()})
        if self._on_end is not None:
            self._on_end(cause)
        self._schedule(self._release_ranks())

    async def _release_ranks(self) -> None:
        """Lets all ranks exit together, once each has printed its exit report or the grace period is over.

        Launchers end the other ranks as soon as one exits, so no rank may exit before all have printed theirs.
        """
        deadline = time.monotonic() + self.deadlines.exit_grace + 1.0
        while time.monotonic() < deadline and not all(
                member.ended or (member.left and rank != self._own_rank) for rank, member in self._members.items()):
            await asyncio.sleep(0.02)
        self._broadcast({"type": "go"})

    async def _watch(self) -> None:
        last_tick, last_beat = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            if now - last_tick > FROZEN:
                for member in self._members.values():
                    member.seen = now
            last_tick = now
            self._check_members(now)
            if (report := self._unproven.report(now)) and self._on_note is not None:
                self._on_note(report)
            if now - last_beat >= 1.0:
                last_beat = now
                self._broadcast({"type": "beat"})
                self._send_missing()

    def _check_members(self, now: float) -> None:
        if self.cause is not None:
            return
        for member in list(self._members.values()):
            if now - member.seen > self.deadlines.liveness and not member.left:
                error = f"gave no sign of life for {self.deadlines.liveness:g} s (stopped, frozen or cut off)"
                self._end(Cause("silent", member.rank, member.host, member.pid, error))
                return
        self._check_exits(now)
        if not self._participation.is_busy:
            self._send_requests((rank, {"type": "forget", "counts": counts})
                                for rank, counts in self._waits.to_forget(now).items())
        places = {rank: member.doing for rank, member in self._members.items()}
        for finding in [*self._waits.check(now, places), *self._stalls.check(self._occupied())]:
            if finding.keys and self._participation.refuse(finding, now):
                self._involve_joined()
                continue
            found = None if finding.rank is None else self._members.get(finding.rank) or self._lost.get(finding.rank)
            cause = Cause(finding.kind, finding.rank, found.host if found else "", found.pid if found else None,
                          finding.text)
            if finding.kind == "warning" and finding.text and self._on_warning is not None:
                self._on_warning(finding.text)
            if finding.kind in ("warning", "stalled") and found is not None:
                stall = finding.text if finding.kind == "warning" else cause.sentence()
                found.send({"type": "where", "stall": stall})
            if finding.kind != "warning":
                self._end(cause)
                return

    def _check_exits(self, now: float) -> None:
        """Reports a rank that has left the job but still runs, since it can no longer report that itself."""
        waited = 0.0 if self._all_ended_at is None else now - self._all_ended_at
        for member in [member for member in self._members.values() if member.left and member.rank != self._own_rank]:
            limits = self.deadlines
            error = f"has left the job, but its process has not ended, {waited:.0f} s after its script did"
            cause = Cause("stalled", member.rank, member.host, member.pid, error)
            # The process has no thread left that could end it earlier.
            if limits.stall_shutdown and waited >= limits.stall_shutdown + limits.liveness:
                error += " (HVKERAS_STALL_SHUTDOWN sets the limit)"
                self._end(dataclasses.replace(cause, error=error))
                return
            if limits.stall_warning and waited >= self._next_exit_warning.get(member.rank, limits.stall_warning):
                self._next_exit_warning[member.rank] = 2.0 * waited
                if self._on_warning is not None:
                    self._on_warning(cause.sentence())

    def _occupied(self) -> set[int]:
        """The ranks whose lack of progress is not a stall: they wait for others, are waited for, or have left."""
        left = {rank for rank, member in self._members.items() if member.left}
        return self._waits.concerned() | left | set(self._participation.joined)
