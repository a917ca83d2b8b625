"""Launcher side of an agent: starts it locally or over ssh, sends it the job, and reads its events.

An agent writes its events as lines of JSON:

    {"type": "hello", "pid": 7, "host": "node1"}
    {"type": "reserved", "ports": [4711, 4712], "address": "10.0.0.2"}
    {"type": "started", "worker": 0, "pid": 8}; with "cold", why it was not forked, under --preload
    {"type": "failed", "worker": 0, "error": "No such file or directory", "errno": 2, "culprit": "pyton", "code": 127}
    {"type": "output", "worker": 0, "stream": "stdout", "data": "<base64>"}
    {"type": "exit", "worker": 0, "code": -9}; with "import_error" if it was not forked, as the imports failed
    {"type": "stopped", "worker": 0}, when it was stopped for too long, but not by the launcher
    {"type": "leaving"}, when SIGTERM announces that the host is being preempted
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hvkeras.errors import MachineError, explain
from hvkeras.host.ssh import Ssh
from hvkeras.launcher.agent import process_state
from hvkeras.launcher.limits import how_to_free_resources, restore_open_files
from hvkeras.launcher.placement import SRUN, HostRanks

# Runs the agent from source text on standard input: the other host needs no hvkeras, and versions cannot differ.
BOOT = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'hvkeras agent', 'exec'))"
AGENT = Path(__file__).with_name("agent.py")
LINE_LIMIT = 256 * 1024  # maximum bytes of an agent's line; the longest hold 64 KiB of output in base64
# Variables that describe the launcher's host or session rather than the job.
_HOST_SPECIFIC = frozenset({
    "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL",
    "SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TERM", "USER", "XAUTHORITY",
    "XDG_RUNTIME_DIR", "XDG_SESSION_ID", "_",
})

Event = dict[str, Any]


def _agent_command(patience: float) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", BOOT, f"{patience:g}"]


def remote_agent_command(ssh: Ssh, host: str, patience: float) -> list[str]:
    """Return the command line that starts an agent on another host; it contains no secret."""
    if ssh.by_srun:
        return [*SRUN, f"--nodelist={host}", *_agent_command(patience)]
    return ssh.command_line(host, "exec " + shlex.join(_agent_command(patience)))


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to export to other hosts: all but those specific to this host or session."""
    return {name: value for name, value in environ.items() if name not in _HOST_SPECIFIC}


class UnreachableError(MachineError):
    """Error for a host whose agent does not answer.

    Args:
        error: The error for this host alone.
    """

    def __init__(self, error: MachineError, why: str) -> None:
        super().__init__(str(error))
        self.why: str = why


class AgentTransport(Protocol):
    """Connection to an agent, which sends and receives lines.

    Attributes:
        hello_timeout: Seconds within which the agent must send its hello.
    """

    hello_timeout: float

    async def open(self) -> None:
        """Start the agent.

        Raises:
            MachineError: The agent cannot be started.
        """

    def unreachable(self, why: str) -> MachineError:
        """Return the error for an agent that does not answer."""

    def name_of(self, said: str) -> str:
        """Return the name of the host for messages; `said` is the name that the agent reported."""

    def order_for(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a start order that is sent to the agent."""

    def send(self, line: bytes) -> None:
        """Send a line, unless the agent has ended."""

    async def read_line(self) -> bytes:
        """Return the next line.

        Raises:
            EOFError: The connection has ended.
        """

    def close(self) -> None:
        """Make the agent end all remaining processes on its host."""

    async def ended(self, timeout: float) -> None:
        """Wait for the agent to end, and kill it after `timeout` seconds."""

    def is_stopped(self, seconds: float) -> bool:
        """Return whether the agent was stopped for too long; True once per stop.

        Args:
            seconds: Seconds since the last check.
        """

    def wake(self) -> None:
        """Resume a stopped agent."""

    async def last_errors(self) -> str:
        """Return the reason for the end of the agent in one line."""


class AgentProcess:
    """Agent that is a child of this process, or of an ssh or srun child.

    Args:
        host: The host, and its first ranks.
        ssh: How to reach other hosts.
        patience: Seconds for which the agent, or a worker, may stay stopped.
    """

    def __init__(self, host: HostRanks, ssh: Ssh, patience: float) -> None:
        self.hello_timeout: float = ssh.timeout
        self._host, self._ssh, self._patience = host, ssh, patience
        self._stopped = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._error_output: asyncio.Task[str] | None = None

    async def open(self) -> None:
        """Start the process, and send it the agent's source.

        Raises:
            MachineError: ssh is not installed, or a process cannot be started.
        """
        command = (_agent_command(self._patience) if self._host.local
                   else remote_agent_command(self._ssh, self._host.name, self._patience))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_LIMIT)
        except FileNotFoundError:
            fix = "name the hosts with -H to use ssh" if self._ssh.by_srun else "install OpenSSH's client"
            raise MachineError(explain(f"{self._ssh.program} must be installed to start ranks on other hosts", fix,
                                       host=self._host.name)) from None
        except OSError as error:
            raise MachineError(explain(f"The launcher must be able to start a process ({error.strerror})",
                                       how_to_free_resources(error.errno or 0), host=self._host.name)) from error
        restore_open_files(self._process.pid)  # before it reads the agent's source
        self._error_output = asyncio.ensure_future(_tail_of(self._pipe("stderr")))
        source = AGENT.read_bytes()
        self.send(str(len(source)).encode() + b"\n" + source)

    def unreachable(self, why: str) -> MachineError:
        """Return the error for a host that does not answer; its hint is a command to try."""
        if self._host.local:
            return MachineError(explain(f"Python must start on this host ({why})", "check the installation",
                                        python=sys.executable))
        if self._ssh.by_srun:
            return MachineError(explain(
                f"srun must start a process on every node of the allocation ({why}), with Python at the same path",
                f"try: srun --overlap -N1 -n1 -w {self._host.name} {shlex.quote(sys.executable)} --version",
                node=self._host.name))
        return MachineError(explain(
            f"Every host must answer over ssh without a password, and have Python at the same path ({why})",
            f"try: ssh -o BatchMode=yes {self._host.name} {shlex.quote(sys.executable)} --version",
            host=self._host.name))

    def name_of(self, said: str) -> str:
        """Return the name that the host reported."""
        return said

    def order_for(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the unchanged order."""
        return job

    def send(self, line: bytes) -> None:
        """Send a line to the process."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    async def read_line(self) -> bytes:
        """Return the next line that the process writes.

        Raises:
            EOFError: The process has ended.
        """
        line = await self._pipe("stdout").readline()
        if not line:
            raise EOFError
        return line

    def close(self) -> None:
        """Close the agent's standard input, on which it ends all remaining processes on its host."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def ended(self, timeout: float) -> None:
        """Wait for the process to end, and kill it after `timeout` seconds."""
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), timeout)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the agent's guard is in the same group
            await self._process.wait()
        if self._error_output is not None:
            if self._host.local:  # an agent without its guard keeps stderr open while it ends processes
                await asyncio.wait({self._error_output}, timeout=timeout)
            self._error_output.cancel()

    def is_stopped(self, seconds: float) -> bool:
        """Return whether the agent's guard, or the ssh to it, was stopped for too long; True once per stop."""
        if self._process is None or self._process.returncode is not None:
            return False
        before = self._stopped
        self._stopped = before + seconds if process_state(self._process.pid) == "T" else 0.0
        return before < self._patience <= self._stopped

    def wake(self) -> None:
        """Resume a stopped agent, and make it end all remaining processes on its host."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
        self.close()

    async def last_errors(self) -> str:
        """Return the standard error of the agent or ssh in one line."""
        if self._error_output is None:
            return ""
        with contextlib.suppress(asyncio.TimeoutError):
            text = await asyncio.wait_for(asyncio.shield(self._error_output), 1.0)
            return "; ".join(line.strip() for line in text.splitlines()[-3:] if line.strip()) or "it exited immediately"
        return "it ended"

    def _pipe(self, name: str) -> asyncio.StreamReader:
        reader: asyncio.StreamReader = getattr(self._process, name)
        return reader


class HostAgent:
    """Launcher's handle of one agent.

    Args:
        on_event: Callback for each event of a worker, and for `leaving`.
    """

    def __init__(self, host: HostRanks, transport: AgentTransport, on_event: Callable[[HostAgent, Event], None]
                 ) -> None:
        self.host = host
        self.host_name: str = host.name
        self.pids: dict[int, int] = {}
        self._has_answered = False
        self._transport = transport
        self._on_event = on_event

    async def connect(self) -> None:
        """Start the agent, and wait for its hello.

        Raises:
            MachineError: The agent cannot be started, or did not answer in time.
        """
        await self._transport.open()
        try:
            await asyncio.wait_for(self._hello(), self._transport.hello_timeout)
            self._has_answered = True
            return
        except asyncio.TimeoutError:
            why = f"no answer for {self._transport.hello_timeout:g} s"
        except EOFError:
            why = await self.last_errors()
        raise UnreachableError(self._transport.unreachable(why), why)

    async def _hello(self) -> None:
        while True:
            event = _event(await self._transport.read_line())  # a login shell may print a greeting as well
            if event is not None and event["type"] == "hello":
                self.host_name = self._transport.name_of(str(event["host"]))
                return

    async def reserve(self, interfaces: Sequence[str]) -> list[str]:
        """Reserve a free port on the host for each rank.

        Args:
            interfaces: The network interfaces that the job uses. If empty, the address that ssh connected to, or the
                host's name, is used.

        Returns:
            The `host:port` of each rank.

        Raises:
            MachineError: The host was lost, or has none of the interfaces.
        """
        self._send({"reserve": len(self.host.ranks), "interfaces": list(interfaces)})
        try:
            while (event := _event(await self._transport.read_line())) is None or event["type"] != "reserved":
                pass
        except EOFError:
            raise self._transport.unreachable(await self.last_errors()) from None
        address = str(event["address"])
        if interfaces and not address:
            raise MachineError(explain("A network interface of each host must have the given name and an IPv4 address",
                                       "see ip address there", host=self.host_name, interfaces=list(interfaces)))
        name = address or self.host.name
        return [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for port in event["ports"]]

    def start(self, job: Mapping[str, Any]) -> None:
        """Send an order to start workers."""
        self._send(self._transport.order_for(job))

    async def run(self, job: Mapping[str, Any]) -> None:
        """Send an order to start workers, and handle events until the agent ends."""
        self.start(job)
        with contextlib.suppress(EOFError):
            while True:
                event = _event(await self._transport.read_line())
                if event is None or not ("worker" in event or event["type"] == "leaving"):
                    continue
                if event["type"] == "started":
                    self.pids[event["worker"]] = event["pid"]
                elif event["type"] == "output":
                    event["data"] = base64.b64decode(event["data"])
                self._on_event(self, event)

    def signal(self, number: int, workers: Sequence[int]) -> None:
        """Send a signal to the process groups of running workers."""
        self._send({"signal": number, "workers": list(workers)})

    def release(self) -> None:
        """Make the agent end all remaining processes on its host."""
        self._transport.close()

    async def ended(self, timeout: float) -> None:
        """Wait for the agent to end, and kill it after `timeout` seconds if possible.

        An agent that has never answered has no workers, and is killed immediately.
        """
        await self._transport.ended(timeout if self._has_answered else 0.0)

    def is_stopped(self, seconds: float) -> bool:
        """Return whether the agent was stopped for too long; True once per stop.

        Args:
            seconds: Seconds since the last check.
        """
        return self._transport.is_stopped(seconds)

    def wake(self) -> None:
        """Resume a stopped agent, and make it end all remaining processes on its host."""
        self._transport.wake()

    async def last_errors(self) -> str:
        """Return the reason for the end of the agent in one line."""
        return await self._transport.last_errors()

    def _send(self, order: Mapping[str, Any]) -> None:
        self._transport.send(json.dumps(order).encode() + b"\n")


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "type" in event else None


async def _tail_of(reader: asyncio.StreamReader) -> str:
    tail = b""
    while data := await reader.read(65536):
        tail = (tail + data)[-65536:]
    return tail.decode(errors="replace")
