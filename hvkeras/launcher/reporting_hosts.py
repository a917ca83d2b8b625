"""Hosts that report to the launcher by themselves, where it cannot start anything: pods, and nodes of a Ray cluster.

On such a host runs `hvkeras.launcher.report`, which connects to the launcher and serves it as an agent that was started
over ssh would. All of it goes through one authenticated connection. A host brings its own environment variables: the
launcher sends none but the settings of hvkeras, and no secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvkeras.control import wire
from hvkeras.control.connections import Connections, Member
from hvkeras.errors import MachineError, explain
from hvkeras.launcher.host_agents import LINE_LIMIT, Event, HostAgent
from hvkeras.launcher.placement import HostRanks
from hvkeras.settings import PREFIX

CHECK_EVERY = 1.0  # seconds between two looks for hosts that are silent
SILENT_AFTER = 15.0  # seconds
HELLO_WITHIN = 30.0  # seconds for an agent to start


class Line:
    """What one host sends, as a stream of lines in the launcher's event loop.

    Args:
        loop: That loop.
        send: Sends the host a line.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[str], None]) -> None:
        self.reader = asyncio.StreamReader(limit=LINE_LIMIT, loop=loop)
        self.send = send
        self.ended = asyncio.Event()
        self._loop = loop

    def receive(self, text: str) -> None:
        """Takes a line from the host; called in another thread."""
        with contextlib.suppress(RuntimeError):  # the job is over
            self._loop.call_soon_threadsafe(self.reader.feed_data, text.encode() + b"\n")

    def end(self) -> None:
        """Ends the stream; called in another thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.reader.feed_eof()
        self.ended.set()


class ReportingHosts(Connections):
    """The hosts that have reported and are still there.

    Args:
        secret: The job's secret.
        host: The address to listen on.
        port: The port; 0 for a free one.
        alive: Seconds after which a silent host counts as lost.
    """

    def __init__(self, secret: str, host: str, port: int = 0, alive: float = SILENT_AFTER) -> None:
        super().__init__(64, secret.encode(), host, port, alive)
        self.secret = secret
        self.on_leaving: Callable[[str], None] = lambda _: None  # called, in another thread, with a host's name
        self._slots: dict[int, int] = {}
        self._machines: dict[str, str] = {}  # what each host says about its machine, by the host's name
        self._leaving: set[int] = set()
        self._lines: dict[int, Line] = {}
        self._guard = threading.Lock()

    def slots(self) -> dict[str, int]:
        """Returns the slots of each host that is there, and is not being taken away."""
        with self._guard:
            present = [member for number, member in sorted(self._members.items())
                       if number not in self._leaving and member.host in self._machines]
            return {member.host: self._slots[member.rank] for member in present}

    def machine_of(self, name: str) -> str:
        """Returns what tells the machine of a host from others; several hosts may be one machine."""
        with self._guard:
            return self._machines.get(name, name)

    def open(self, name: str) -> Line:
        """Opens the line to a host.

        Raises:
            MachineError: The host is not there any more, or serves another launcher's object already.
        """
        with self._guard:
            number = next((number for number, member in self._members.items() if member.host == name), None)
            if number is None or number in self._lines:
                raise MachineError(explain("A host must be there when ranks start on it", "see its own output",
                                           host=name))
            line = self._lines[number] = Line(asyncio.get_running_loop(), lambda text: self._send(number, "line", text))
        self._send(number, "open", "")
        return line

    def hang_up(self, name: str) -> None:
        """Tells a host that nothing more will come: it ends what is left there."""
        with self._guard:
            numbers = [number for number, member in self._members.items() if member.host == name]
        for number in numbers:
            self._send(number, "over", "")

    def finish(self, code: int) -> None:
        """Tells all hosts how the job has ended, and stops."""
        for number in list(self._members):
            self._send(number, "finished", str(code))
        time.sleep(0.1)  # what was sent is sent before the connections close
        self.stop()

    def _send(self, number: int, kind: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send_to, number, {"type": kind, "text": text})

    def _send_to(self, number: int, message: wire.Message) -> None:
        if number in self._members:
            self._members[number].send(message)

    def _admit(self, hello: wire.Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        member = Member(int(hello["rank"]), str(hello["host"]), int(hello["pid"]), writer, seal, time.monotonic())
        with self._guard:
            before = self._members.get(member.rank)
            taken = before is not None or any(one.host == member.host for one in self._members.values())
            if not taken:
                self._members[member.rank] = member
                self._slots[member.rank] = int(hello["size"])
                self._leaving.discard(member.rank)
        if taken:
            member.send({"type": "refused", "reason": f"host {member.host} has reported already, and is still there"})
            return None
        member.send({"type": "welcome"})
        return member

    def _handle(self, member: Member, message: wire.Message) -> None:
        member.seen = time.monotonic()
        if message["type"] == "line":
            line = self._lines.get(member.rank)
            if line is not None:
                line.receive(message["text"])
        elif message["type"] == "about":
            with self._guard:
                self._machines[member.host] = message["machine"]
        elif message["type"] == "ended":
            with self._guard:
                line = self._lines.pop(member.rank, None)
            if line is not None:
                line.end()
        elif message["type"] == "leaving":
            with self._guard:
                self._leaving.add(member.rank)
            self.on_leaving(member.host)

    def _lose(self, member: Member) -> None:
        with self._guard:
            if self._members.get(member.rank) is not member:
                return
            del self._members[member.rank]
            line = self._lines.pop(member.rank, None)
        if line is not None:
            line.end()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY)
            for member in list(self._members.values()):
                if time.monotonic() - member.seen > self._alive:
                    self._lose(member)
                    member.writer.close()


class ReportedAgent(HostAgent):
    """The agent of a host that has reported by itself.

    Args:
        host: The host and its ranks.
        hosts: All such hosts.
        on_event: Called with each event that names a rank.
    """

    def __init__(self, host: HostRanks, hosts: ReportingHosts, on_event: Callable[[HostAgent, Event], None]) -> None:
        super().__init__(host, None, on_event, 0.0)
        self._hosts = hosts
        self._line: Line | None = None

    async def connect(self) -> None:
        """Opens the line to the host, and waits for its agent's hello.

        Raises:
            MachineError: The host is not there any more.
        """
        self._line = self._hosts.open(self.host.name)
        try:
            await asyncio.wait_for(self._hello(), HELLO_WITHIN)
        except (asyncio.TimeoutError, EOFError):
            raise MachineError(explain("A host that has reported must start an agent", "see its own output",
                                       host=self.host.name)) from None
        self.host_name = self.host.name

    def start(self, job: Mapping[str, Any]) -> None:
        """Has the host start ranks, in its own folder and with its own environment."""
        settings = {name: value for name, value in job["environment"].items()
                    if name.startswith(PREFIX) and name != f"{PREFIX}SECRET"}
        self._send(json.dumps({**job, "environment": settings}).encode() + b"\n")

    def release(self) -> None:
        """Lets the host end whatever is left there."""
        self._hosts.hang_up(self.host.name)

    async def ended(self, timeout: float) -> None:
        """Waits until the host has ended what was left there, for `timeout` seconds at most."""
        if self._line is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._line.ended.wait(), timeout)

    def is_stopped(self, seconds: float) -> bool:  # noqa: ARG002 - the signature of agents
        """Returns False: a host that stops is silent, and counts as lost."""
        return False

    def wake(self) -> None:
        """Does nothing."""

    async def last_errors(self) -> str:
        """Returns what is known about the end of the host."""
        return "it does not answer any more"

    def _send(self, data: bytes) -> None:
        if self._line is not None:
            self._line.send(data.decode().rstrip("\n"))

    async def _read_line(self) -> bytes:
        line = b"" if self._line is None else await self._line.reader.readline()
        if not line:
            raise EOFError
        return line
