"""The launcher's side of an agent: starts it locally or over ssh, sends it the job, and reads its events.

An agent writes its events as lines of JSON:

    {"type": "hello", "pid": 7, "host": "node1"}
    {"type": "reserved", "ports": [4711, 4712], "address": "10.0.0.2"}
    {"type": "started", "worker": 0, "pid": 8}
    {"type": "failed", "worker": 0, "error": "No such file or directory", "errno": 2, "culprit": "pyton", "code": 127}
    {"type": "output", "worker": 0, "stream": "stdout", "data": "<base64>"}
    {"type": "exit", "worker": 0, "code": -9}
    {"type": "stopped", "worker": 0}, once something else than the launcher has stopped it for too long
    {"type": "leaving"}, once SIGTERM announces that the host is being taken away
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
from hvkeras.launcher.limits import give_back_open_files, how_to_free_resources
from hvkeras.launcher.placement import SRUN, HostRanks

# Runs the agent from source text on standard input: the other host needs no hvkeras, and versions cannot differ.
BOOT = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'hvkeras agent', 'exec'))"
AGENT = Path(__file__).with_name("agent.py")
LINE_LIMIT = 256 * 1024  # bytes of an agent's lines, of which the longest are 64 KiB of output in base64
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
    """Returns the command line that starts an agent on another host; it contains nothing secret."""
    if ssh.by_srun:
        return [*SRUN, f"--nodelist={host}", *_agent_command(patience)]
    return ssh.command_line(host, "exec " + shlex.join(_agent_command(patience)))


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to export to other hosts: all but those that belong to this host or session."""
    return {name: value for name, value in environ.items() if name not in _HOST_SPECIFIC}


class UnreachableError(MachineError):
    """A host whose agent does not answer.

    Args:
        error: The error for this host alone.
        why: What is known, in short.
    """

    def __init__(self, error: MachineError, why: str) -> None:
        super().__init__(str(error))
        self.why: str = why


class AgentTransport(Protocol):
    """What carries lines to an agent and from it.

    Attributes:
        hello_within: Seconds in which an agent says hello.
    """

    hello_within: float

    async def open(self) -> None:
        """Starts the agent.

        Raises:
            MachineError: It cannot be started.
        """

    def unreachable(self, why: str) -> MachineError:
        """Returns the error for an agent that does not answer."""

    def name_of(self, said: str) -> str:
        """Returns the name of the host in messages; `said` is how the agent calls it."""

    def order_for(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what is sent of an order to start ranks."""

    def send(self, line: bytes) -> None:
        """Sends a line, unless the agent is gone."""

    async def read_line(self) -> bytes:
        """Returns the next line.

        Raises:
            EOFError: There is none.
        """

    def close(self) -> None:
        """Lets the agent end whatever is left on its host."""

    async def ended(self, timeout: float) -> None:
        """Waits for the end of the agent, and enforces it after `timeout` seconds."""

    def is_stopped(self, seconds: float) -> bool:
        """Returns whether the agent has been stopped for too long; true once per stop.

        Args:
            seconds: Seconds since the last check.
        """

    def wake(self) -> None:
        """Resumes a stopped agent."""

    async def last_errors(self) -> str:
        """Returns what is known about the end of the agent, in one line."""


class AgentProcess:
    """An agent as a process below this one, or behind an ssh or srun below it.

    Args:
        host: The host, and the ranks that the job begins with there.
        ssh: How to reach other hosts.
        patience: Seconds for which the agent, or a worker, may stay stopped.
    """

    def __init__(self, host: HostRanks, ssh: Ssh, patience: float) -> None:
        self.hello_within: float = ssh.timeout
        self._host, self._ssh, self._patience = host, ssh, patience
        self._stopped = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._error_output: asyncio.Task[str] | None = None

    async def open(self) -> None:
        """Starts the process, and sends it the agent's source.

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
        give_back_open_files(self._process.pid)  # before it reads the agent's source
        self._error_output = asyncio.ensure_future(_tail_of(self._pipe("stderr")))
        source = AGENT.read_bytes()
        self.send(str(len(source)).encode() + b"\n" + source)

    def unreachable(self, why: str) -> MachineError:
        """Returns the error for a host that does not answer, with a command to try."""
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
        """Returns the name that the host has for itself."""
        return said

    def order_for(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the order as it is."""
        return job

    def send(self, line: bytes) -> None:
        """Sends a line to the process."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    async def read_line(self) -> bytes:
        """Returns the next line that the process writes.

        Raises:
            EOFError: It has ended.
        """
        line = await self._pipe("stdout").readline()
        if not line:
            raise EOFError
        return line

    def close(self) -> None:
        """Closes the agent's standard input, so that it ends whatever is left on its host."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def ended(self, timeout: float) -> None:
        """Waits for the process to end, and kills it after `timeout` seconds."""
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
        """Returns whether the agent's guard, or the ssh to it, has been stopped for too long; true once per stop."""
        if self._process is None or self._process.returncode is not None:
            return False
        before = self._stopped
        self._stopped = before + seconds if process_state(self._process.pid) == "T" else 0.0
        return before < self._patience <= self._stopped

    def wake(self) -> None:
        """Resumes a stopped process, so that it ends what is left on its host."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
        self.close()

    async def last_errors(self) -> str:
        """Returns what the agent, or ssh, printed to standard error, in one line."""
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
    """One agent, as the launcher sees it.

    Args:
        host: The host and its ranks.
        transport: What carries lines to the agent and from it.
        on_event: Called with each event that names a rank.
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
        """Starts the agent and waits for its hello.

        Raises:
            MachineError: It cannot be started, or the host cannot be reached in time.
        """
        await self._transport.open()
        try:
            await asyncio.wait_for(self._hello(), self._transport.hello_within)
            self._has_answered = True
            return
        except asyncio.TimeoutError:
            why = f"no answer for {self._transport.hello_within:g} s"
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
        """Has the agent reserve a free port for each rank.

        Args:
            interfaces: The network interfaces that the job uses; without any, the address that ssh connected to is
                used, or the host's name.

        Returns:
            The `host:port` of each rank.

        Raises:
            MachineError: The host was lost, or has no such interface.
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
        """Has the agent start workers."""
        self._send(self._transport.order_for(job))

    async def run(self, job: Mapping[str, Any]) -> None:
        """Has the agent start workers, and passes events on until it ends."""
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
        """Sends a signal to the process groups of running workers."""
        self._send({"signal": number, "workers": list(workers)})

    def release(self) -> None:
        """Lets the agent end whatever is left on its host."""
        self._transport.close()

    async def ended(self, timeout: float) -> None:
        """Waits for the end of the agent, and enforces it after `timeout` seconds where it can.

        One that has never answered runs nothing, and is not waited for.
        """
        await self._transport.ended(timeout if self._has_answered else 0.0)

    def is_stopped(self, seconds: float) -> bool:
        """Returns whether the agent has been stopped for too long; true once per stop.

        Args:
            seconds: Seconds since the last check.
        """
        return self._transport.is_stopped(seconds)

    def wake(self) -> None:
        """Resumes a stopped agent, so that it ends what is left on its host."""
        self._transport.wake()

    async def last_errors(self) -> str:
        """Returns what is known about the end of the agent, in one line."""
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
    """Reads to the end of the stream, and returns the last part."""
    tail = b""
    while data := await reader.read(65536):
        tail = (tail + data)[-65536:]
    return tail.decode(errors="replace")
