"""A rank's end of the control channel: sends heartbeats, agrees on values, and reports and receives failures."""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvkeras.control import wire
from hvkeras.control.cause import Cause
from hvkeras.control.clock import Clock
from hvkeras.control.connection import Introduction
from hvkeras.control.exchange import Exchange
from hvkeras.control.process_exit import ExitWatch
from hvkeras.control.progress_watch import Watch, steps_of
from hvkeras.control.stop_agreement import Stop
from hvkeras.host.console import say
from hvkeras.host.error_text import summary
from hvkeras.host.network import host_identity
from hvkeras.progress import activity, location

if TYPE_CHECKING:
    from hvkeras.control.relay import Deadlines
    from hvkeras.plans.entry_counts import EntryCounts

BEAT = 0.5  # seconds between two heartbeats
BEAT_WITH_JOINED_RANKS = 0.01  # the same while some rank has joined and waits to learn what the others do
FROZEN = 2.0  # a heartbeat later than this means that this process itself was stopped


class ControlClient(Exchange):
    """One rank's connection to the job's control server.

    Args:
        connection: A connected socket.
        secret: The job's secret.
        introduction: What this rank reports about itself.
        liveness_timeout: Seconds without a message from the server after which it counts as lost.
        on_end: Called once, from the client's thread, with the cause when the job ends early.

    Raises:
        ProofError: The server does not know the secret.
        UsageError: The server refuses this rank; the message gives the reason.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        introduction: Introduction,
        liveness_timeout: float,
        on_end: Callable[[Cause], None],
    ) -> None:
        self.entries: EntryCounts | None = None
        self.watch: Watch | None = None  # see `watch_progress`
        self.clock: Clock = Clock(host_identity())
        self.detached: bool = False  # the server has shut down in good order, together with its rank
        self.server_is_rank = True  # False under `hvkeras run`, where the launcher runs the server
        self.server_host = ""
        self._starter: int | None = None
        self._exit_watch: ExitWatch | None = None
        self.liveness = liveness_timeout
        self._on_end = on_end
        self._beat_lock = threading.Lock()
        self._sent_counts: dict[str, int] = {}
        self._sent_sites: dict[str, str] = {}
        self._has_failed = False
        self._may_exit = threading.Event()
        self._some_joined = False
        self._asked: list[str] = []  # the exchanges in which this rank waits, as the server knows
        self._called: set[str] = set()  # plans whose calls the server knows
        self.on_involvement: Callable[[wire.Message], None] | None = None  # see `hvkeras.collectives.join.hear`
        self.on_refusal: Callable[[str, str], None] | None = None  # see `hvkeras.collectives.mismatch.refuse`
        self.on_told: Callable[[Cause], None] = self.fail  # called when the launcher is told to end the job
        self._stops: dict[str, Stop] = {}
        self._last_heard = time.monotonic()
        super().__init__(connection, secret, introduction)
        self._threads = [
            threading.Thread(target=self._listen, name="hvkeras-control-listen", daemon=True),
            threading.Thread(target=self._send_beats, name="hvkeras-control-beat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def watch_progress(self, *limits: float) -> None:
        """Makes heartbeats report a lack of progress that exceeds one of these limits, in seconds; 0 is no limit."""
        self.watch = Watch(*limits)
        self.watch.on_move = self._report_move

    def set_deadlines(self, deadlines: Deadlines) -> None:
        """Makes the server take over the deadlines of this rank, the first one."""
        self._send({"type": "deadlines", "seconds": dataclasses.asdict(deadlines)})

    def watch_exit(self, exit_watch: ExitWatch) -> None:
        """Makes this rank report when its process outlives its script, and end the job if that takes too long."""
        self._exit_watch = exit_watch

    def script_ended(self) -> None:
        """Reports that this rank's script has ended, so that only its process keeps the job alive."""
        if self._exit_watch is not None:
            self._exit_watch.begin()
            if self.detached:
                self._exit_watch.others_have_ended()
            self._send({"type": "over"})

    def watch_starter(self, descriptor: int) -> None:
        """Ends the job when the process that started this rank is gone.

        Args:
            descriptor: A file descriptor that becomes readable when that happens.
        """
        self._starter = descriptor

    def join(self, entries: EntryCounts) -> None:
        """Registers with the job (again): from now on, heartbeats carry the counts of entered plans."""
        self.entries = entries
        self._send({"type": "join"})

    def measure_clock(self) -> None:
        """Starts comparing this host's clock with the server's, without waiting for the result; see `clock`."""
        if self.clock.begin():
            self._ask_time()

    def _ask_time(self) -> None:
        self._send({"type": "clock", "asked": self.clock.now()})

    def stop_of(self, fit: str) -> Stop:
        """The agreement on when a `fit` stops early; `ask_to_stop` requests a stop.

        Args:
            fit: Identifies the call of `fit`; the same on all ranks.
        """
        return self._stops.setdefault(fit, Stop())

    def ask_to_stop(self, fit: str, ranks: Sequence[int]) -> None:
        """Reports that this rank wants to stop a `fit`.

        Args:
            fit: Identifies the call of `fit`.
            ranks: All ranks that participate in it.
        """
        self._send({"type": "stop", "fit": fit, "ranks": list(ranks)})

    def forget_stop(self, fit: str) -> None:
        """Forgets a finished `fit`."""
        self._stops.pop(fit, None)

    def start_join(self) -> None:
        """Reports that this rank has no more data, and asks to be informed of what the others do."""
        self._send_beat()
        self._send({"type": "joined"})

    def fail(self, cause: Cause, secondary: bool = False) -> None:
        """Tells all ranks that this one failed.

        Args:
            cause: What happened.
            secondary: Whether it looks like a consequence of another rank's failure; the server then waits briefly
                for the report of that failure.
        """
        self._has_failed = True
        self._send({"type": "failed", "cause": cause.to_message(), "secondary": secondary})

    def wait_to_exit(self, timeout: float) -> None:
        """Reports that this rank has printed its exit report, and waits until all ranks have."""
        self._send({"type": "ended"})
        self._may_exit.wait(timeout)

    def leave(self) -> None:
        """Leaves in good order: the job continues without this rank, which sends no newer counts."""
        self._send_beat()
        self._send({"type": "leave"})

    def excuse_ending(self) -> None:
        """Allows this rank's process to exit late, because it waits for others."""
        if self._exit_watch is not None:
            self._exit_watch.excuse()

    def _listen(self) -> None:
        try:
            while True:
                message = self._read()
                try:
                    self._handle(message)
                except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
                    self._fail_with(f"at a message ({message.get('type')})", error)
        except (OSError, wire.ProofError, ValueError):
            if not self._closed.is_set() and not self.detached:
                self._server_lost("ended unexpectedly (killed, crashed, or out of memory)", "lost")

    def _handle(self, message: wire.Message) -> None:
        self._last_heard = time.monotonic()
        if message["type"] == "clock" and self.clock.receive_answer(message["asked"], message["time"], message["host"]):
            self._ask_time()
        if message["type"] == "end":
            self._end(Cause.from_message(message["cause"]))
        if message["type"] == "where":
            self._send_location(message.get("stall"))
        if message["type"] == "some joined":
            self._some_joined = message["any"]
        if message["type"] == "forget":
            self._forget(message["counts"])
        if message["type"] == "refused":
            self._refuse(message["key"], message["text"], message["owed"])
        if message["type"] in ("involved", "all joined") and self.on_involvement is not None:
            self.on_involvement(message)
        self._handle_stop(message)
        self._note(message)

    def _handle_stop(self, message: wire.Message) -> None:
        if message["type"] == "told":
            self.on_told(Cause.from_message(message["cause"]))
        elif message["type"] == "stopping":
            self._send({"type": "come to", "fit": message["fit"], "executions": self.stop_of(message["fit"]).answer()})
        elif message["type"] == "stop after":
            self.stop_of(message["fit"]).decide(message["executions"], message["wishes"])

    def _note(self, message: wire.Message) -> None:
        """Stores what other threads of this rank wait for."""
        with self._changed:
            self._take_values(message)
            if message["type"] == "go":
                self._may_exit.set()
            elif message["type"] == "closing":
                self.detached = True
            if message["type"] in ("closing", "all over") and self._exit_watch is not None:
                self._exit_watch.others_have_ended()
            self._changed.notify_all()

    def _send_location(self, stall: str | None) -> None:
        """Prints this rank's location and stack, and reports the location to the server."""
        still = 0.0
        if self.watch is not None:
            still = self.watch.still(time.monotonic())
            self.watch.is_reported |= stall is not None
        rank, host = self.introduction.rank, self.introduction.host
        self._send({"type": "here", "outside": location.outside_tensorflow(), "doing": location.report(
            rank, host, steps_of(self.entries), still, stall)})

    def _report_move(self, still: float) -> None:
        if self._has_failed or self.cause is not None:  # the end has moved this rank, and the last line is its cause
            return
        say(f"rank {self.introduction.rank} on {self.introduction.host} is making progress again, after {still:.0f} s")

    def _refuse(self, key: str, text: str, owed: list[str]) -> None:
        """Makes this rank raise in a plan that it waits in, and reports whether it can: compiled functions cannot."""
        can_raise = False
        if self.entries is not None and self.on_refusal is not None:
            self.entries.set_owed(owed)
            can_raise = self.entries.can_raise(key)
            if can_raise:
                self.on_refusal(key, text)
        self._send({"type": "noted", "key": key, "raises": can_raise})

    def _end(self, cause: Cause) -> None:
        with self._changed:
            if self.cause is not None:
                return
            self.cause: Cause | None = cause
            self._changed.notify_all()
        self._on_end(cause)

    def _server_lost(self, error: str, kind: str) -> None:
        self._end(Cause(kind, 0, self.server_host, None, error) if self.server_is_rank else
                  Cause(kind, None, "", None, f"the launcher {error}"))
        self._may_exit.set()

    def _send_beats(self) -> None:
        try:
            self._beat_until_closed()
        except Exception as error:  # noqa: BLE001 - else this rank would count as silent
            self._fail_with("in its heartbeat", error)

    def _fail_with(self, what: str, error: Exception) -> None:
        """Ends the job for a fault of hvkeras in a thread of the control channel."""
        text, me = "".join(traceback.format_exception(error)), self.introduction
        say(f"the control channel has failed {what}\n{text}")
        self.fail(Cause("exception", me.rank, me.host, os.getpid(),
                        f"failed in the control channel {what} with {summary(error)}", text))

    def _beat_until_closed(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(BEAT_WITH_JOINED_RANKS if self._some_joined else BEAT):
            now = time.monotonic()
            if now - last > FROZEN:
                self._last_heard = now
                if self.watch is not None:
                    self.watch.forgive(now)
            last = now
            self._send_beat()
            self._check_exit(now)
            if self._starter is not None and select.select([self._starter], [], [], 0)[0]:
                os.close(self._starter)
                self._starter = None
                self.fail(Cause("lost", None, self.introduction.host, None, f"the launcher on {self.introduction.host}"
                                " ended unexpectedly (killed, crashed, or out of memory)"))
            if now - self._last_heard > self.liveness and not self.detached:
                self._server_lost(f"gave no sign of life for {self.liveness:g} s (stopped, frozen or cut off)",
                                  "silent")
                return

    def _check_exit(self, now: float) -> None:
        """Ends the job if this process runs for too long after its script has ended."""
        moved = 0.0 if self.watch is None else now - self.watch.still(now)
        if self._exit_watch is not None and (error := self._exit_watch.check(now, moved)):
            me = self.introduction
            cause = Cause("stalled", me.rank, me.host, os.getpid(), error)
            self.fail(cause)
            if self.detached:
                self._end(cause)

    def _forget(self, counts: dict[str, int]) -> None:
        """Forgets plans that no rank has entered lately, unless this rank has entered them again in the meantime."""
        with self._beat_lock:  # heartbeats before the answer continue the old counts; those after it start from zero
            keys = [] if self.entries is None else self.entries.forget(counts)
            for key in keys:
                self._sent_counts.pop(key, None)
                self._sent_sites.pop(key, None)
                self._called.discard(key)
            self._send({"type": "forgotten", "asked": counts, "keys": keys})

    def _send_beat(self) -> None:
        with self._beat_lock:  # so that counts are sent in the order in which they were read
            self._send(self._beat())

    def _beat(self) -> wire.Message:
        message: wire.Message = {"type": "beat"}
        entries = self.entries
        if entries is not None:
            changed = {key: seen for key, seen in entries.snapshot().items() if self._sent_counts.get(key) != seen[0]}
            message["plans"] = {key: seen[1].describe() for key, seen in changed.items()
                                if key not in self._sent_counts}
            message["counts"] = {key: seen[0] for key, seen in changed.items()}
            self._sent_counts.update(message["counts"])
            sites = {key: entries.site(key) for key in changed}
            message["sites"] = {key: site for key, site in sites.items() if self._sent_sites.get(key) != site}
            self._sent_sites.update(message["sites"])
            if self._some_joined:
                message["calls"] = {key: calls for key, calls in entries.calls().items() if key not in self._called}
                self._called.update(message["calls"])
        asks = self._waiting_in()
        if asks or self._asked:
            message["asks"] = self._asked = asks
        if self.watch is not None:
            still = self.watch.check(time.monotonic(), bool(message.get("counts")), entries)
            message["still"] = None if self._asking else still
        return message

    def _waiting_in(self) -> list[str]:
        """The exchanges in which this rank waits, and not a thread beside its work, such as one that reads ahead."""
        asking = dict(self._asking)
        if not asking:
            return []
        waits = activity.doing().phase == "input"
        return [key for key, thread in asking.items() if waits or thread == activity.thread()]
