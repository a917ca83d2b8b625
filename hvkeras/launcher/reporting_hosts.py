"""Hosts that connect to the launcher by themselves, as it cannot start processes there: pods, Ray or Spark slots.

Such a host runs `hvkeras.launcher.host_reporter`, which connects to the launcher and serves it like an agent that was
started over ssh. All lines use one authenticated connection. A host has its own environment variables: the launcher
sends only the settings of hvkeras, without the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvkeras.control.handler import Handler, Member, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import (
    AgentEnded,
    AgentLine,
    EndAgent,
    HostLeaving,
    JobFinished,
    Machine,
    Message,
    StartAgent,
)
from hvkeras.errors import MachineError, explain
from hvkeras.launcher.host_agents import LINE_LIMIT
from hvkeras.launcher.placement import HostRanks
from hvkeras.settings import PREFIX

LIVENESS_TIMEOUT = 15.0  # default: seconds without a message after which a host counts as lost
HELLO_TIMEOUT = 30.0  # seconds within which an agent must start


class Lines:
    """Stream of lines from one host, in the launcher's event loop.

    Args:
        send: Thread-safe function that sends the host a line.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[str], None]) -> None:
        self.reader = asyncio.StreamReader(limit=LINE_LIMIT, loop=loop)
        self.send = send
        self.ended = asyncio.Event()
        self._loop = loop

    def receive(self, text: str) -> None:
        """Add a line from the host; called in another thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self.reader.feed_data, text.encode() + b"\n")

    def end(self) -> None:
        """End the stream; called in another thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.reader.feed_eof()
        self.ended.set()


class _Host:
    """Connected host."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.machine = ""  # identity of its machine; "" until it was received
        self.is_leaving = False
        self.lines: Lines | None = None

    def take_lines(self) -> Lines | None:
        lines, self.lines = self.lines, None
        return lines


class HostsHandler(Handler):
    """Registry of the connected hosts; any thread may read it.

    Args:
        alive: Seconds without a message after which a host counts as lost.

    Attributes:
        on_leaving: Callback, in the server's thread, with the name of a host that is being preempted.
    """

    def __init__(self, alive: float) -> None:
        self.members = Members()
        self.on_leaving: Callable[[str], None] = lambda _: None
        self._alive = alive
        self._guard = threading.Lock()
        self._hosts: dict[int, _Host] = {}

    def on_join(self, member: Member) -> str:
        """Admit a host, unless one of the same name or number is connected; return the reason of a rejection, or ""."""
        with self._guard:
            if member.number in self._hosts or any(one.member.host == member.host for one in self._hosts.values()):
                return f"host {member.host} is already connected"
            self._hosts[member.number] = _Host(member)
            return ""

    def on_message(self, member: Member, message: Message) -> None:
        """Handle a message from a host."""
        host = self._hosts.get(member.number)
        if host is None or host.member is not member:
            return
        match message:
            case AgentLine():
                if host.lines is not None:
                    host.lines.receive(message.text)
            case Machine():
                host.machine = message.identity
            case AgentEnded():
                with self._guard:
                    lines = host.take_lines()
                if lines is not None:
                    lines.end()
            case HostLeaving():
                host.is_leaving = True
                self.on_leaving(member.host)

    def on_leave(self, member: Member) -> None:
        """Remove a host."""
        with self._guard:
            lines = self._hosts.pop(member.number).take_lines()
        if lines is not None:
            lines.end()

    def on_tick(self, now: float) -> None:
        """Close the connections of silent hosts."""
        for member in list(self.members.values()):
            if now - member.seen > self._alive:
                member.close()

    def present(self) -> list[_Host]:
        """Return the connected hosts, ordered by number."""
        with self._guard:
            return [host for _, host in sorted(self._hosts.items())]

    def open(self, name: str, loop: asyncio.AbstractEventLoop, send: Callable[[Member, Message], None]) -> Lines:
        """Open the stream of lines from a host.

        Raises:
            MachineError: The host is not connected any more, or has an open stream.
        """
        with self._guard:
            host = next((host for host in self._hosts.values() if host.member.host == name), None)
            if host is None or host.lines is not None:
                raise MachineError(explain("A host must be connected when ranks start on it", "see its own output",
                                           host=name))
            member = host.member
            lines = host.lines = Lines(loop, lambda text: send(member, AgentLine(text)))
        send(member, StartAgent())
        return lines


class ReportingHosts:
    """Server for the connected hosts.

    Args:
        port: The port; 0 for a free one.
        alive: Seconds without a message after which a host counts as lost.
    """

    def __init__(self, secret: str, host: str, port: int = 0, alive: float = LIVENESS_TIMEOUT) -> None:
        self.secret = secret
        self._handler = HostsHandler(alive)
        self._server = MessageServer(self._handler, secret.encode(), host, port, alive=alive)
        self.address: tuple[str, int] = self._server.address

    def start(self) -> tuple[str, int]:
        """Start the server; return the address that hosts connect to."""
        return self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def finish(self, code: int) -> None:
        """Notify all hosts of the job's exit code, and stop the server."""
        self._server.call(self._handler.members.broadcast, JobFinished(code))
        time.sleep(0.1)  # so that the message is sent before the connections close
        self.stop()

    def notify_leaving(self, function: Callable[[str], None]) -> None:
        """Set the callback, run in another thread, with the name of a host that is being preempted."""
        self._handler.on_leaving = function

    def slots(self) -> dict[str, int]:
        """Return the slots of each connected host that is not being preempted."""
        return {host.member.host: host.member.size for host in self._handler.present()
                if host.machine and not host.is_leaving}

    def machines(self) -> dict[str, str]:
        """Return the machine identity of each connected host; several hosts may be on one machine."""
        return {host.member.host: host.machine for host in self._handler.present() if host.machine}

    def open(self, name: str) -> Lines:
        """Open the stream of lines from a host.

        Raises:
            MachineError: The host is not connected any more, or has an open stream.
        """
        return self._handler.open(name, asyncio.get_running_loop(), self._send)

    def hang_up(self, name: str) -> None:
        """Make a host end its agent and all remaining processes."""
        for host in self._handler.present():
            if host.member.host == name:
                self._send(host.member, EndAgent())

    def _send(self, member: Member, message: Message) -> None:
        self._server.call(member.send, message)


class ReportedTransport:
    """Connection to the agent of a host that connects by itself."""

    hello_timeout = HELLO_TIMEOUT

    def __init__(self, host: HostRanks, hosts: ReportingHosts) -> None:
        self._name, self._hosts = host.name, hosts
        self._lines: Lines | None = None

    async def open(self) -> None:
        """Open the stream of lines.

        Raises:
            MachineError: The host is not connected any more.
        """
        self._lines = self._hosts.open(self._name)

    def unreachable(self, why: str) -> MachineError:  # noqa: ARG002 - the host prints the reason
        """Return the error for a host that does not start an agent."""
        return MachineError(explain("A connected host must start an agent", "see its own output",
                                    host=self._name))

    def name_of(self, said: str) -> str:  # noqa: ARG002 - several hosts may be on one machine
        """Return the name with which the host has connected."""
        return self._name

    def order_for(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the order with hvkeras's settings only: a host has its own folder and environment."""
        settings = {name: value for name, value in job["environment"].items()
                    if name.startswith(PREFIX) and name != f"{PREFIX}SECRET"}
        return {**job, "environment": settings}

    def send(self, line: bytes) -> None:
        """Send a line."""
        if self._lines is not None:
            self._lines.send(line.decode().rstrip("\n"))

    async def read_line(self) -> bytes:
        """Return the next line.

        Raises:
            EOFError: The host was lost, or its agent has ended.
        """
        line = b"" if self._lines is None else await self._lines.reader.readline()
        if not line:
            raise EOFError
        return line

    def close(self) -> None:
        """Make the host end all remaining processes."""
        self._hosts.hang_up(self._name)

    async def ended(self, timeout: float) -> None:
        """Wait until all processes on the host have ended, for `timeout` seconds at most."""
        if self._lines is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lines.ended.wait(), timeout)

    def is_stopped(self, seconds: float) -> bool:  # noqa: ARG002 - the signature of transports
        """Return False: a stopped host misses heartbeats, and counts as lost."""
        return False

    def wake(self) -> None:
        """Do nothing."""

    async def last_errors(self) -> str:
        """Return the reason for the end of the host."""
        return "it does not answer any more"
