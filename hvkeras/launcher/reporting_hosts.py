"""Hosts that report to the launcher by themselves, where it cannot start anything: pods, and nodes of a Ray cluster.

On such a host runs `hvkeras.launcher.host_reporter`, which connects to the launcher and serves it as an agent that was
started over ssh would. All of it goes through one authenticated connection. A host brings its own environment
variables: the launcher sends none but the settings of hvkeras, and no secret.
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

SILENT_AFTER = 15.0  # seconds
HELLO_WITHIN = 30.0  # seconds for an agent to start


class Lines:
    """What one host sends, as a stream of lines in the launcher's event loop.

    Args:
        loop: That loop.
        send: Sends the host a line; any thread may call this.
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


class _Host:
    """A host that has reported, and is still there."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.machine = ""  # the identity of its machine, once it has said that
        self.is_leaving = False
        self.lines: Lines | None = None

    def take_lines(self) -> Lines | None:
        lines, self.lines = self.lines, None
        return lines


class HostsHandler(Handler):
    """Keeps the hosts that have reported. Any thread may read them.

    Args:
        alive: Seconds after which a silent host counts as lost.

    Attributes:
        on_leaving: Called, in the server's thread, with the name of a host that is being taken away.
    """

    def __init__(self, alive: float) -> None:
        self.members = Members()
        self.on_leaving: Callable[[str], None] = lambda _: None
        self._alive = alive
        self._guard = threading.Lock()
        self._hosts: dict[int, _Host] = {}

    def on_join(self, member: Member) -> str:
        """Admits a host, unless one of its name or number is there."""
        with self._guard:
            if member.number in self._hosts or any(one.member.host == member.host for one in self._hosts.values()):
                return f"host {member.host} has reported already, and is still there"
            self._hosts[member.number] = _Host(member)
            return ""

    def on_message(self, member: Member, message: Message) -> None:
        """Handles what a host reports."""
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
        """Forgets a host."""
        with self._guard:
            lines = self._hosts.pop(member.number).take_lines()
        if lines is not None:
            lines.end()

    def on_tick(self, now: float) -> None:
        """Closes the connections of silent hosts."""
        for member in list(self.members.values()):
            if now - member.seen > self._alive:
                member.close()

    def present(self) -> list[_Host]:
        """Returns the hosts that are there, in the order of their numbers."""
        with self._guard:
            return [host for _, host in sorted(self._hosts.items())]

    def open(self, name: str, loop: asyncio.AbstractEventLoop, send: Callable[[Member, Message], None]) -> Lines:
        """Opens the stream of lines from a host.

        Raises:
            MachineError: The host is not there any more, or serves another agent already.
        """
        with self._guard:
            host = next((host for host in self._hosts.values() if host.member.host == name), None)
            if host is None or host.lines is not None:
                raise MachineError(explain("A host must be there when ranks start on it", "see its own output",
                                           host=name))
            member = host.member
            lines = host.lines = Lines(loop, lambda text: send(member, AgentLine(text)))
        send(member, StartAgent())
        return lines


class ReportingHosts:
    """The hosts that have reported and are still there.

    Args:
        secret: The job's secret.
        host: The address to listen on.
        port: The port; 0 for a free one.
        alive: Seconds after which a silent host counts as lost.
    """

    def __init__(self, secret: str, host: str, port: int = 0, alive: float = SILENT_AFTER) -> None:
        self.secret = secret
        self._handler = HostsHandler(alive)
        self._server = MessageServer(self._handler, secret.encode(), host, port, alive=alive)
        self.address: tuple[str, int] = self._server.address

    def start(self) -> tuple[str, int]:
        """Starts serving; returns the address that hosts connect to."""
        return self._server.start()

    def stop(self) -> None:
        """Stops serving."""
        self._server.stop()

    def finish(self, code: int) -> None:
        """Tells all hosts how the job has ended, and stops."""
        self._server.call(self._handler.members.broadcast, JobFinished(code))
        time.sleep(0.1)  # what was sent is sent before the connections close
        self.stop()

    def notify_leaving(self, function: Callable[[str], None]) -> None:
        """Sets what is called, in another thread, with the name of a host that is being taken away."""
        self._handler.on_leaving = function

    def slots(self) -> dict[str, int]:
        """Returns the slots of each host that is there, and is not being taken away."""
        return {host.member.host: host.member.size for host in self._handler.present()
                if host.machine and not host.is_leaving}

    def machines(self) -> dict[str, str]:
        """Returns what tells the machine of each host that is there from others; several hosts may be one machine."""
        return {host.member.host: host.machine for host in self._handler.present() if host.machine}

    def open(self, name: str) -> Lines:
        """Opens the stream of lines from a host.

        Raises:
            MachineError: The host is not there any more, or serves another agent already.
        """
        return self._handler.open(name, asyncio.get_running_loop(), self._send)

    def hang_up(self, name: str) -> None:
        """Tells a host that nothing more will come: it ends what is left there."""
        for host in self._handler.present():
            if host.member.host == name:
                self._send(host.member, EndAgent())

    def _send(self, member: Member, message: Message) -> None:
        self._server.call(member.send, message)


class ReportedTransport:
    """The connection to the agent of a host that has reported by itself.

    Args:
        host: The host and its ranks.
        hosts: All such hosts.
    """

    hello_within = HELLO_WITHIN

    def __init__(self, host: HostRanks, hosts: ReportingHosts) -> None:
        self._name, self._hosts = host.name, hosts
        self._lines: Lines | None = None

    async def open(self) -> None:
        """Opens the stream of lines.

        Raises:
            MachineError: The host is not there any more.
        """
        self._lines = self._hosts.open(self._name)

    def unreachable(self, why: str) -> MachineError:  # noqa: ARG002 - the host knows why
        """Returns the error for a host that does not start an agent."""
        return MachineError(explain("A host that has reported must start an agent", "see its own output",
                                    host=self._name))

    def name_of(self, said: str) -> str:  # noqa: ARG002 - several of them may be one machine
        """Returns the name under which the host has reported."""
        return self._name

    def order_for(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the order with the settings alone: a host has its own folder and environment."""
        settings = {name: value for name, value in job["environment"].items()
                    if name.startswith(PREFIX) and name != f"{PREFIX}SECRET"}
        return {**job, "environment": settings}

    def send(self, line: bytes) -> None:
        """Sends a line."""
        if self._lines is not None:
            self._lines.send(line.decode().rstrip("\n"))

    async def read_line(self) -> bytes:
        """Returns the next line.

        Raises:
            EOFError: There is none, as the host or its agent is gone.
        """
        line = b"" if self._lines is None else await self._lines.reader.readline()
        if not line:
            raise EOFError
        return line

    def close(self) -> None:
        """Lets the host end whatever is left there."""
        self._hosts.hang_up(self._name)

    async def ended(self, timeout: float) -> None:
        """Waits until the host has ended what was left there, for `timeout` seconds at most."""
        if self._lines is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lines.ended.wait(), timeout)

    def is_stopped(self, seconds: float) -> bool:  # noqa: ARG002 - the signature of transports
        """Returns False: a host that stops is silent, and counts as lost."""
        return False

    def wake(self) -> None:
        """Does nothing."""

    async def last_errors(self) -> str:
        """Returns what is known about the end of the host."""
        return "it does not answer any more"
