"""A rank's end of the control channel: sends heartbeats, exchanges values, and reports and receives failures."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hvkeras.control import location, wire
from hvkeras.control.cause import ENDED, Cause, CauseKind, silent_for
from hvkeras.control.clock import Clock
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.exchange import Exchange
from hvkeras.control.heartbeat import Entries, Heartbeats, Watch
from hvkeras.control.messages import (
    AllJoined,
    AllScriptsEnded,
    AllValues,
    ClockAnswer,
    ClockQuestion,
    Closing,
    Deadlines,
    ExitReported,
    Failed,
    ForgetPlans,
    JobEnded,
    JoinCalled,
    LeftJob,
    Locate,
    Location,
    MayExit,
    Message,
    MissingRanks,
    Participate,
    PlanRefused,
    PlansWanted,
    RefusalConfirmed,
    Registered,
    ScriptEnded,
    ServerLost,
    SomeJoined,
    StopAfter,
    StopAnswer,
    StopQuestion,
    StopWish,
    Terminate,
    ValueWanted,
)
from hvkeras.control.process_exit import ExitWatch
from hvkeras.control.relayed_ranks import as_runs, from_runs
from hvkeras.control.stop_agreement import Stop
from hvkeras.errors import summary
from hvkeras.host.console import say
from hvkeras.host.network import host_identity, local_peer

BEAT = 0.5  # seconds between two heartbeats
BEAT_BEHIND_RELAY = 0.9  # the same behind a relay, which forwards them once a second, each time with one of every rank
BEAT_WITH_JOINED_RANKS = 0.01  # the same while some rank has joined, and must follow the other ranks
FROZEN = 2.0  # a heartbeat later than this means that this process itself was stopped


class ControlClient:
    """One rank's connection to the job's control server.

    Args:
        introduction: What this rank reports about itself.
        liveness_timeout: Seconds without a message from the server after which it counts as lost.
        on_end: Called once from the client's thread with the cause when the job ends early.
        on_timeout: See `Connection`.

    Raises:
        AuthenticationError: The server fails to authenticate.
        UsageError: The server rejects this rank; the message gives the reason.
    """

    def __init__(
        self,
        connected: socket.socket,
        secret: bytes,
        introduction: Introduction,
        liveness_timeout: float,
        on_end: Callable[[Cause], None],
        on_timeout: Callable[[], None] | None = None,
    ) -> None:
        self.introduction = introduction
        self.clock: Clock = Clock(host_identity())
        self.detached: bool = False  # the server has shut down normally, together with its rank
        self.server_is_rank = True  # False under `hvkeras run`, where the launcher runs the server
        self.server_host = ""
        self.liveness = liveness_timeout
        self.on_participation: Callable[[Participate | AllJoined], None] | None = None  # see `hvkeras.collectives.join`
        self.on_refusal: Callable[[str, str], None] | None = None  # see `Refusals` in `hvkeras.collectives.mismatch`
        self.on_terminate: Callable[[Cause], None] = self.fail  # called when the launcher is asked to end the job
        self._on_end = on_end
        self._launcher: int | None = None
        self._exit_watch: ExitWatch | None = None
        self._has_failed = False
        self._may_exit = threading.Event()
        self._stops: dict[str, Stop] = {}
        self._last_received = time.monotonic()
        peer = local_peer(connected)
        self._relay = peer[0] if peer else None  # the relay's process id; None if connected directly to the server
        self._connection = Connection(connected, secret, introduction, on_timeout)
        # This host's address on the route to the server, and thus to the other hosts.
        self.local_address: str = self._connection.local_address
        self._exchange = Exchange(introduction.size, self._connection.send)
        self._beat = BEAT if self._relay is None else BEAT_BEHIND_RELAY
        self._heartbeats = Heartbeats(self._connection.send, self._exchange.waiting_in,
                                      lambda: self._exchange.is_waiting)
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            AllValues: self._exchange.on_message, MissingRanks: self._exchange.on_message,
            ValueWanted: self._exchange.on_message,
            PlansWanted: lambda message: self._heartbeats.describe(message.keys),
            AllJoined: self._participate, Participate: self._participate, PlanRefused: self._refuse,
            SomeJoined: self._on_some_joined, ForgetPlans: lambda message: self._heartbeats.forget(message.counts),
            StopQuestion: self._answer_stop,
            StopAfter: lambda message: self.stop_of(message.fit).decide(message.executions,
                                                                              from_runs(message.wishes)),
            ClockAnswer: self._on_clock_answer, Locate: self._send_location,
            Terminate: lambda message: self.on_terminate(message.cause),
            JobEnded: lambda message: self._end(message.cause), MayExit: lambda _: self._may_exit.set(),
            AllScriptsEnded: self._on_others_end, Closing: self._on_others_end, ServerLost: self._on_server_lost,
        }
        self._connection.start(threading.Thread(target=self._listen, name="hvkeras-control-listen", daemon=True))
        self._connection.start(threading.Thread(target=self._send_beats, name="hvkeras-control-beat", daemon=True))

    @property
    def cause(self) -> Cause | None:
        """The reason why the job has ended early; None while it runs."""
        return self._exchange.cause

    def gather(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None = None,
        describe: Callable[[list[int]], str] | None = None, given_up: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Collect one value from every rank; see `Exchange.gather`."""
        return self._exchange.gather(key, value, timeout, on_missing, describe, given_up)

    def wait_for_cause(self, timeout: float) -> Cause | None:
        """Wait until the server reports why the job ends; return None on timeout."""
        return self._exchange.wait_for_cause(timeout)

    def raise_if_ended(self) -> None:
        """Raise PeerError if the job has ended."""
        self._exchange.raise_if_ended()

    def watch_progress(self, *limits: float) -> None:
        """Report a lack of progress beyond one of these limits, in seconds, with heartbeats; 0 is no limit."""
        self._heartbeats.watch = Watch(*limits, on_move=self._report_move)

    def set_deadlines(self, deadlines: Deadlines) -> None:
        """Send the deadlines of this rank, which must be rank 0, to the server."""
        self._connection.send(deadlines)

    def watch_exit(self, exit_watch: ExitWatch) -> None:
        """Report when this rank's process outlives its script, and end the job if that takes too long."""
        self._exit_watch = exit_watch

    def script_ended(self) -> None:
        """Report that this rank's script has ended, so that only its process keeps the job alive."""
        if self._exit_watch is not None:
            self._exit_watch.begin()
            if self.detached:
                self._exit_watch.others_have_ended()
            self._connection.send(ScriptEnded())

    def watch_launcher(self, descriptor: int) -> None:
        """End the job when the process that started this rank ends.

        Args:
            descriptor: A file descriptor that becomes readable when that happens.
        """
        self._launcher = descriptor

    def join(self, entries: Entries) -> None:
        """Register with the job (again): from now on, heartbeats carry the counts of entered plans."""
        self._heartbeats.entries = entries
        self._connection.send(Registered())

    def measure_clock(self) -> None:
        """Start comparing this host's clock with the server's, without waiting for the result; see `clock`."""
        if self.clock.begin():
            self._ask_time()

    def _ask_time(self) -> None:
        self._connection.send(ClockQuestion(self.clock.now()))

    def stop_of(self, fit: str) -> Stop:
        """Return the agreement on when a `fit` stops early; `ask_to_stop` requests a stop.

        Args:
            fit: The identifier of the call of `fit`; equal on all ranks.
        """
        return self._stops.setdefault(fit, Stop())

    def ask_to_stop(self, fit: str, ranks: Sequence[int]) -> None:
        """Report that this rank wants to stop a `fit`.

        Args:
            fit: The identifier of the call of `fit`.
            ranks: All ranks that participate in it.
        """
        self._connection.send(StopWish(fit, as_runs(ranks)))

    def forget_stop(self, fit: str) -> None:
        """Remove the state of a finished `fit`."""
        self._stops.pop(fit, None)

    def start_join(self) -> None:
        """Report that this rank has no more data, and request updates about the other ranks."""
        self._heartbeats.send()
        self._connection.send(JoinCalled())

    def fail(self, cause: Cause, secondary: bool = False) -> None:
        """Notify all ranks that this one failed.

        Args:
            secondary: True if it looks like a consequence of another rank's failure; the server then waits briefly for
                that rank's report.
        """
        self._has_failed = True
        self._connection.send(Failed(cause, secondary))

    def wait_to_exit(self, timeout: float) -> None:
        """Report that this rank has printed its exit report, and wait until all ranks have."""
        self._connection.send(ExitReported())
        self._may_exit.wait(timeout)

    def leave(self) -> None:
        """Leave normally: the job continues without this rank, which sends no further counts."""
        self._heartbeats.send()
        self._connection.send(LeftJob())

    def excuse_ending(self) -> None:
        """Allow this rank's process to exit late, because it waits for others."""
        if self._exit_watch is not None:
            self._exit_watch.excuse()

    def stop_reading(self) -> None:
        """Keep the connection open until this process exits, so that the server detects the exit."""
        self._connection.stop_reading()

    def close(self) -> None:
        """Close the connection and stop the threads."""
        self._connection.close()

    # Messages from the server, in the channel's thread.

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.read()
                self._last_received = time.monotonic()
                try:
                    self._handle(message)
                except Exception as error:  # noqa: BLE001 - an internal error, not reported elsewhere
                    self._fail_with(f"at a message ({type(message).__name__})", error)
                del message  # it may be large
        except (OSError, wire.AuthenticationError, ValueError):
            if not self._connection.closed.is_set() and not self.detached:
                self._connection_lost(ENDED, CauseKind.LOST)

    def _handle(self, message: Message) -> None:
        if (handle := self._handlers.get(type(message))) is not None:
            handle(message)

    def _on_clock_answer(self, message: ClockAnswer) -> None:
        if self.clock.receive_answer(message.asked, message.time, message.host):
            self._ask_time()

    def _on_some_joined(self, message: SomeJoined) -> None:
        self._heartbeats.some_joined = message.joined

    def _participate(self, message: Participate | AllJoined) -> None:
        if self.on_participation is not None:
            self.on_participation(message)

    def _answer_stop(self, message: StopQuestion) -> None:
        self._connection.send(StopAnswer(message.fit, self.stop_of(message.fit).answer()))

    def _on_others_end(self, message: Closing | AllScriptsEnded) -> None:
        self.detached |= isinstance(message, Closing)
        if self._exit_watch is not None:
            self._exit_watch.others_have_ended()

    def _send_location(self, message: Locate) -> None:
        still, watch = 0.0, self._heartbeats.watch
        if watch is not None:
            still = watch.still(time.monotonic())
            watch.is_reported |= message.stall is not None
        doing = location.report(self.introduction.rank, self.introduction.host, self._heartbeats.steps(), still,
                                message.stall)
        self._connection.send(Location(location.outside_tensorflow(), doing))

    def _report_move(self, still: float) -> None:
        if self._has_failed or self.cause is not None:  # the job ends, and its cause must be the last line
            return
        say(f"rank {self.introduction.rank} on {self.introduction.host} is making progress again, after {still:.0f} s")

    def _refuse(self, message: PlanRefused) -> None:
        """Raise in a plan in which this rank waits, and report whether it can: compiled functions cannot."""
        can_raise, entries = False, self._heartbeats.entries
        if entries is not None and self.on_refusal is not None:
            entries.set_outstanding(message.outstanding)
            can_raise = entries.can_raise(message.key)
            if can_raise:
                self.on_refusal(message.key, message.text)
        self._connection.send(RefusalConfirmed(message.key, can_raise))

    def _end(self, cause: Cause) -> None:
        if self._exchange.end(cause):
            self._on_end(cause)

    def _connection_lost(self, error: str, kind: CauseKind) -> None:
        """End the job because the other end of the connection is lost: the server, or the relay of this host."""
        if self._relay is None:
            self._server_lost(error, kind)
            return
        host = self.introduction.host
        self._end(Cause(kind, None, host, self._relay, f"the relay on {host} (pid {self._relay}), which connects the"
                        f" ranks there, {error}"))
        self._may_exit.set()

    def _on_server_lost(self, message: ServerLost) -> None:
        if not self.detached:
            self._server_lost(message.error, CauseKind.SILENT if message.silent else CauseKind.LOST)

    def _server_lost(self, error: str, kind: CauseKind) -> None:
        self._end(Cause(kind, 0, self.server_host, None, error) if self.server_is_rank else
                  Cause(kind, None, "", None, f"the launcher {error}"))
        self._may_exit.set()

    # Heartbeats, in a separate thread.

    def _send_beats(self) -> None:
        try:
            self._beat_until_closed()
        except Exception as error:  # noqa: BLE001 - else this rank would count as silent
            self._fail_with("in its heartbeat", error)

    def _fail_with(self, what: str, error: Exception) -> None:
        """End the job because of an internal error in a thread of the control channel."""
        text, me = "".join(traceback.format_exception(error)), self.introduction
        say(f"the control channel has failed {what}\n{text}")
        self.fail(Cause(CauseKind.EXCEPTION, me.rank, me.host, os.getpid(),
                        f"failed in the control channel {what} with {summary(error)}", text))

    def _beat_until_closed(self) -> None:
        last = beat_at = time.monotonic()
        while not self._connection.closed.wait(BEAT_WITH_JOINED_RANKS if self._heartbeats.some_joined
                                                else self._beat):
            now = time.monotonic()
            if now - last > FROZEN:
                self._last_received = now
                if self._heartbeats.watch is not None:
                    self._heartbeats.watch.restart(now)
            last = now
            is_due = now - beat_at >= self._beat - BEAT_WITH_JOINED_RANKS
            beat_at = now if is_due else beat_at
            self._heartbeats.send(only_news=not is_due)
            self._check_exit(now)
            if self._launcher is not None and select.select([self._launcher], [], [], 0)[0]:
                os.close(self._launcher)
                self._launcher = None
                host = self.introduction.host
                self.fail(Cause(CauseKind.LOST, None, host, None, f"the launcher on {host} ended unexpectedly (killed,"
                                " crashed, or out of memory)"))
            if now - self._last_received > self.liveness and not self.detached:
                self._connection_lost(silent_for(self.liveness), CauseKind.SILENT)
                return

    def _check_exit(self, now: float) -> None:
        watch = self._heartbeats.watch
        moved = 0.0 if watch is None else now - watch.still(now)
        if self._exit_watch is not None and (error := self._exit_watch.check(now, moved)):
            me = self.introduction
            cause = Cause(CauseKind.STALLED, me.rank, me.host, os.getpid(), error)
            self.fail(cause)
            if self.detached:
                self._end(cause)
