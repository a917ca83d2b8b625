"""Program of a host that reports to the launcher and serves as its agent, such as a pod of a Kubernetes Indexed Job.

It connects to the launcher, starts the agent (`hvkeras.launcher.agent`) as a child process, and forwards lines in both
directions. It exits with the job. A lost connection ends the ranks of this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras.control import wire
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.launch_environments import indexed_job
from hvkeras.control.launch_environments.launch import Launch
from hvkeras.control.messages import (
    AgentEnded,
    AgentLine,
    EndAgent,
    Heartbeat,
    HostLeaving,
    JobFinished,
    Machine,
    Message,
    StartAgent,
)
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.console import say
from hvkeras.host.network import host_identity, keep_alive, outward_address, split_address
from hvkeras.launcher.host_agents import AGENT, BOOT
from hvkeras.launcher.placement import THIS_HOST
from hvkeras.launcher.preload import preload_of
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.settings import PREFIX, Settings

RETRY_INTERVAL = 0.5  # seconds
HEARTBEAT_INTERVAL = 2.0  # seconds between two heartbeats
FIRST_REPORT, REPORT_EVERY = 3.0, 30.0  # seconds until a wait is first reported, and between later reports
LOST = 1  # exit code when the connection to the launcher is lost


@dataclass(frozen=True)
class HostOverrides:
    """Command line and additional environment variables of the ranks on a host, in place of the launcher's."""

    command: Sequence[str]
    variables: Mapping[str, str]


class Reporter:
    """This host's connection to the launcher.

    Args:
        slots: The number of ranks that it can run.
        here: Command and variables of the ranks on this host; the launcher's by default.
    """

    def __init__(self, connected: socket.socket, secret: str, number: int, name: str, slots: int,
                 here: HostOverrides | None = None) -> None:
        self._connection = Connection(connected, secret.encode(), Introduction(number, slots, name))
        self._secret, self._here = secret, here
        self._connection.send(Machine(host_identity()))
        self._is_preempted = False
        self._agent: subprocess.Popen[bytes] | None = None
        self._forwarder: threading.Thread | None = None

    def leave(self) -> None:
        """Notify the launcher that this host is being preempted: its ranks leave at their next commit."""
        self._is_preempted = True
        self._connection.send(HostLeaving())

    def serve(self, folder: str) -> int:
        """Serve the launcher until the job is done.

        Returns:
            The exit code of the job, or 143 (SIGTERM) if this host was preempted.
        """
        done = threading.Event()
        heartbeats = threading.Thread(target=self._send_heartbeats, args=(done,), name="hvkeras-report-beat",
                                      daemon=True)
        heartbeats.start()
        code = LOST
        try:
            with contextlib.suppress(OSError, wire.AuthenticationError, ValueError):
                while not isinstance(message := self._connection.read(), JobFinished):
                    self._handle(message, folder)
                code = message.code
        finally:
            self._end_agent()
            done.set()
            heartbeats.join()
            self._connection.close()
        return 128 + signal.SIGTERM if self._is_preempted else code

    def _handle(self, message: Message, folder: str) -> None:
        match message:
            case StartAgent():
                self._start_agent()
            case EndAgent():
                self._end_agent()
                if self._is_preempted:
                    raise ConnectionError("this host is being preempted, and its ranks have ended")
            case AgentLine():
                order = json.loads(message.text)
                if "folder" in order:
                    self._complete(order, folder)
                self._write(json.dumps(order).encode() + b"\n")

    def _complete(self, order: dict[str, Any], folder: str) -> None:
        order["folder"] = folder
        order["environment"][f"{PREFIX}SECRET"] = self._secret
        if self._here is not None:
            order["environment"] |= self._here.variables
            order["preload"] = preload_of(self._here.command, Settings(order["environment"]), folder)[0]
            for worker in order["workers"]:
                worker["command"] = list(self._here.command)

    def _start_agent(self) -> None:
        self._end_agent()
        self._agent = subprocess.Popen([sys.executable, "-I", "-S", "-c", BOOT, f"{Settings().liveness_timeout:g}"],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        source = AGENT.read_bytes()
        self._write(str(len(source)).encode() + b"\n" + source)
        self._forwarder = threading.Thread(target=self._forward_events, args=(self._agent.stdout,),
                                           name="hvkeras-report-agent", daemon=True)
        self._forwarder.start()

    def _end_agent(self) -> None:
        """Close the agent's standard input, on which it ends all remaining processes, and wait for it."""
        if self._agent is None or self._forwarder is None or self._agent.stdin is None or self._agent.stdout is None:
            return
        with contextlib.suppress(OSError):
            self._agent.stdin.close()
        self._forwarder.join()
        self._agent.stdout.close()
        self._agent.wait()
        self._agent = self._forwarder = None

    def _write(self, data: bytes) -> None:
        if self._agent is not None and self._agent.stdin is not None:
            with contextlib.suppress(OSError):  # the agent has ended, which its events report
                self._agent.stdin.write(data)
                self._agent.stdin.flush()

    def _forward_events(self, events: Any) -> None:
        for line in events:
            self._connection.send(AgentLine(line.decode().rstrip("\n")))
        self._connection.send(AgentEnded())

    def _send_heartbeats(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_INTERVAL):
            self._connection.send(Heartbeat())


def report(address: tuple[str, int], secret: str, number: int, name: str, slots: int, timeout: float,
           may_wait: Callable[[], bool] = lambda: True, here: HostOverrides | None = None) -> int:
    """Connect to a launcher, and serve it until the job is done.

    In a main thread, SIGTERM means that this host is being preempted.

    Args:
        address: Host and port of the launcher.
        slots: The number of ranks that it can run.
        timeout: Seconds to wait for the launcher.
        may_wait: Function that returns False to stop waiting.
        here: Command and variables of the ranks on this host; the launcher's by default.

    Returns:
        The exit code: that of the job, 143 if this host was preempted, 1 if the connection to the launcher was lost.

    Raises:
        MachineError: The launcher could not be reached in time.
        AuthenticationError: The launcher has another secret.
        UsageError: A host of that name is already connected.
    """
    began = time.monotonic()
    while True:
        try:
            with contextlib.ExitStack() as on_failure:
                connected = on_failure.enter_context(_connected(address, timeout, may_wait))
                reporter = Reporter(connected, secret, number, name, slots, here)
                on_failure.pop_all()
            break
        except (UsageError, OSError) as error:
            if time.monotonic() - began > timeout:
                if isinstance(error, UsageError):
                    raise
                raise MachineError(explain(f"The launcher must answer within {timeout:g} s ({error})",
                                           "see the launcher's own output", address=address)) from None
            # The launcher was stopped, or has not noticed yet that the last host of this name is gone.
            time.sleep(RETRY_INTERVAL)
    if threading.current_thread() is not threading.main_thread():
        return reporter.serve(os.getcwd())
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: threading.Thread(
        target=reporter.leave, name="hvkeras-report-leave", daemon=True).start())
    try:
        return reporter.serve(os.getcwd())
    finally:
        signal.signal(signal.SIGTERM, before)


def _connected(address: tuple[str, int], timeout: float, may_wait: Callable[[], bool]) -> socket.socket:
    began, next_report = time.monotonic(), FIRST_REPORT
    while True:
        try:
            connected = socket.create_connection(address, timeout=10.0)
            keep_alive(connected, Settings().liveness_timeout)
            return connected
        except OSError as error:
            waited, why = time.monotonic() - began, error.strerror or str(error)
        if waited > timeout or not may_wait():
            raise MachineError(explain(f"The launcher must be reachable within {timeout:g} s ({why})", "see the output"
                                       " of the host that it runs on", address="{}:{}".format(*address)))
        if waited >= next_report:
            next_report = waited + REPORT_EVERY
            say(f"waiting for the launcher at {address[0]}:{address[1]}, {waited:.0f} s of {timeout:g} s: {why}")
        time.sleep(RETRY_INTERVAL)


COOL_DOWN = (1.0, 60.0)  # default: seconds for which a lost pod is set aside


def pod(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch environment of this pod; None if it does not belong to an Indexed Job.

    Raises:
        UsageError: The variables contradict each other, or there is no secret.
    """
    launch = indexed_job.detect(environ)
    if launch is not None and not Settings(environ).secret:
        raise UsageError(explain("Pods must authenticate with the job's secret", "set HVKERAS_SECRET in the manifest,"
                                 " from a Secret"))
    return launch


def report_from_pod(launch: Launch, slots: int) -> int:
    """Connect to the pod of the launcher, and serve it until the job is done; return the exit code."""
    settings = Settings()
    name = launch.tasks[launch.rank].removeprefix("pod ")
    return report(split_address(launch.rendezvous.address), settings.secret, launch.rank, name, slots,
                  settings.start_timeout)


def hosts_of_pods(launch: Launch) -> ReportingHosts:
    """Start a server for the other pods of the job, and return it."""
    settings = Settings()
    hosts = ReportingHosts(settings.secret, outward_address(), split_address(launch.rendezvous.address)[1],
                           settings.liveness_timeout)
    hosts.start()
    return hosts


def slots_of(hosts: ReportingHosts, own: int) -> Callable[[], dict[str, int]]:
    """Return a function that returns the slots of this pod and of all connected hosts."""
    return lambda: {THIS_HOST: own, **hosts.slots()}
