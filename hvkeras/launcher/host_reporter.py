"""Program of a host that reports to the launcher and serves as its agent, such as a pod of a Kubernetes Indexed Job.

It connects to the launcher, starts the agent (`hvkeras.launcher.agent`) as a child, and passes lines on in both
directions. It ends with the job. A lost connection ends the ranks of this host.
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
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.settings import PREFIX, Settings

RETRY_EVERY = 0.5  # seconds
BEAT_EVERY = 2.0  # seconds between two signs of life
FIRST_REPORT, REPORT_EVERY = 3.0, 30.0  # seconds until a wait for the launcher is reported, and reported again
LOST = 1  # exit code when the launcher is lost


@dataclass(frozen=True)
class OnHost:
    """What the ranks of a host have instead of what the launcher sends.

    Attributes:
        command: Their command line.
        variables: More environment variables.
    """

    command: Sequence[str]
    variables: Mapping[str, str]


class Reporter:
    """This host's connection to the launcher.

    Args:
        connected: The connected socket.
        secret: The job's secret.
        number: This host's number.
        name: Its name.
        slots: How many ranks it has room for.
        here: What the ranks of this host have of their own.
    """

    def __init__(self, connected: socket.socket, secret: str, number: int, name: str, slots: int,
                 here: OnHost | None = None) -> None:
        self._connection = Connection(connected, secret.encode(), Introduction(number, slots, name))
        self._secret, self._here = secret, here
        self._connection.send(Machine(host_identity()))
        self._leaving = False
        self._agent: subprocess.Popen[bytes] | None = None
        self._passing: threading.Thread | None = None

    def leave(self) -> None:
        """Tells the launcher that this host is being taken away: its ranks leave at their next commit."""
        self._leaving = True
        self._connection.send(HostLeaving())

    def serve(self, folder: str) -> int:
        """Serves the launcher until the job is over.

        Args:
            folder: The ranks' working folder.

        Returns:
            The exit code: that of the job, or 143 if this host was taken away.
        """
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(over,), name="hvkeras-report-beat", daemon=True)
        beating.start()
        code = LOST
        try:
            with contextlib.suppress(OSError, wire.AuthenticationError, ValueError):
                while not isinstance(message := self._connection.read(), JobFinished):
                    self._obey(message, folder)
                code = message.code
        finally:
            self._end_agent()
            over.set()
            beating.join()
            self._connection.close()
        return 128 + signal.SIGTERM if self._leaving else code

    def _obey(self, message: Message, folder: str) -> None:
        match message:
            case StartAgent():
                self._start_agent()
            case EndAgent():
                self._end_agent()
                if self._leaving:
                    raise ConnectionError("this host is being taken away, and nothing runs on it any more")
            case AgentLine():
                order = json.loads(message.text)
                if "folder" in order:
                    self._complete(order, folder)
                self._write(json.dumps(order).encode() + b"\n")

    def _complete(self, order: dict[str, Any], folder: str) -> None:
        """Adds what the workers of this host have of their own to an order to start them."""
        order["folder"] = folder
        order["environment"][f"{PREFIX}SECRET"] = self._secret
        if self._here is not None:
            order["environment"] |= self._here.variables
            for worker in order["workers"]:
                worker["command"] = list(self._here.command)

    def _start_agent(self) -> None:
        self._end_agent()
        self._agent = subprocess.Popen([sys.executable, "-I", "-S", "-c", BOOT, f"{Settings().liveness_timeout:g}"],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        source = AGENT.read_bytes()
        self._write(str(len(source)).encode() + b"\n" + source)
        self._passing = threading.Thread(target=self._pass_on, args=(self._agent.stdout,), name="hvkeras-report-agent",
                                         daemon=True)
        self._passing.start()

    def _end_agent(self) -> None:
        """Closes the agent's standard input, so that it ends whatever is left on this host, and waits for that."""
        if self._agent is None or self._passing is None or self._agent.stdin is None or self._agent.stdout is None:
            return
        with contextlib.suppress(OSError):
            self._agent.stdin.close()
        self._passing.join()
        self._agent.stdout.close()
        self._agent.wait()
        self._agent = self._passing = None

    def _write(self, data: bytes) -> None:
        if self._agent is not None and self._agent.stdin is not None:
            with contextlib.suppress(OSError):  # the agent has ended, and its events have said so
                self._agent.stdin.write(data)
                self._agent.stdin.flush()

    def _pass_on(self, events: Any) -> None:
        for line in events:
            self._connection.send(AgentLine(line.decode().rstrip("\n")))
        self._connection.send(AgentEnded())

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_EVERY):
            self._connection.send(Heartbeat())


def report(address: tuple[str, int], secret: str, number: int, name: str, slots: int, timeout: float,
           may_wait: Callable[[], bool] = lambda: True, here: OnHost | None = None) -> int:
    """Reports to a launcher, and serves it until the job is over.

    SIGTERM to a process whose main thread this is means that this host is being taken away.

    Args:
        address: Where the launcher listens.
        secret: The job's secret.
        number: This host's number.
        name: Its name.
        slots: How many ranks it has room for.
        timeout: Seconds to wait for the launcher.
        may_wait: Returns False when it need not be waited for any longer.
        here: What the ranks of this host have of their own; the launcher's by default.

    Returns:
        The exit code: that of the job, 143 if this host was taken away, 1 if the launcher was lost.

    Raises:
        MachineError: The launcher was not there in time.
        AuthenticationError: It has another secret.
        UsageError: A host of that name has reported already.
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
            time.sleep(RETRY_EVERY)  # it stood still, or has not noticed yet that the last one of this name is gone
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
            raise MachineError(explain(f"The launcher must be there within {timeout:g} s ({why})", "see the output of"
                                       " the host that it runs on", address="{}:{}".format(*address)))
        if waited >= next_report:
            next_report = waited + REPORT_EVERY
            say(f"waiting for the launcher at {address[0]}:{address[1]}, {waited:.0f} s of {timeout:g} s: {why}")
        time.sleep(RETRY_EVERY)


COOL_DOWN = (1.0, 60.0)  # seconds for which a pod that was lost is set aside, unless the command line says otherwise


def pod(environ: Mapping[str, str]) -> Launch | None:
    """Returns the place of this pod among those of its Indexed Job; None if this is no pod of one.

    Raises:
        UsageError: The variables contradict each other, or there is no secret.
    """
    launch = indexed_job.detect(environ)
    if launch is not None and not Settings(environ).secret:
        raise UsageError(explain("Pods must prove that they belong to the job", "set HVKERAS_SECRET in the manifest,"
                                 " from a Secret"))
    return launch


def report_from_pod(launch: Launch, slots: int) -> int:
    """Reports this pod to the one that launches, and serves it until the job is over; returns the exit code."""
    settings = Settings()
    name = launch.tasks[launch.rank].removeprefix("pod ")
    return report(split_address(launch.rendezvous.address), settings.secret, launch.rank, name, slots,
                  settings.start_timeout)


def hosts_of_pods(launch: Launch) -> ReportingHosts:
    """Returns the hosts that report to this pod, for which it listens from now on."""
    settings = Settings()
    hosts = ReportingHosts(settings.secret, outward_address(), split_address(launch.rendezvous.address)[1],
                           settings.liveness_timeout)
    hosts.start()
    return hosts


def slots_of(hosts: ReportingHosts, own: int) -> Callable[[], dict[str, int]]:
    """Returns what finds the slots that there are: those of this pod, and of those that have reported."""
    return lambda: {THIS_HOST: own, **hosts.slots()}
