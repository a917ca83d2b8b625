"""Checks of several hosts: their own checks, run over ssh, and names, routes, clocks and versions."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvkeras.control import wire
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.handler import Handler, Member, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import HostTime, HostTimeNoted, Message
from hvkeras.diagnostics.doctor.machine import NOTE, OK, PROBLEM, CheckResult, check_result
from hvkeras.errors import UsageError
from hvkeras.host.network import address_towards
from hvkeras.host.ssh import Ssh

CALL_DEADLINE = 5.0  # seconds for a connection between hosts
ANSWER_DEADLINE = 180.0  # seconds for the checks on a host
MAX_CLOCK_OFFSET = 1.0  # seconds
_NO_CONNECTION, _UNKNOWN_NAME = 255, "Could not resolve hostname"  # exit code and message of ssh

Report = dict[str, Any]  # `findings` and `versions` of a host


class CallHandler(Handler):
    """Handler that records the clocks of calling hosts.

    Attributes:
        clocks: Clock offset of each host in seconds, positive if it is ahead.
    """

    def __init__(self) -> None:
        self.members = Members()
        self.clocks: dict[str, float] = {}

    def on_message(self, member: Member, message: Message) -> None:
        """Record the clock offset of a host."""
        if isinstance(message, HostTime):
            self.clocks[member.host] = message.time - time.time()
            member.send(HostTimeNoted())


class CallServer:
    """Server that accepts authenticated calls from other hosts, and records their clocks.

    Args:
        host: One of the other hosts, which determines the address to listen on.
    """

    def __init__(self, host: str) -> None:
        self.secret: str = secrets.token_hex(32)  # sent to the hosts through the standard input of ssh
        self.handler = CallHandler()
        self.server = MessageServer(self.handler, self.secret.encode(), address_towards(host))


def call(address: str, name: str, secret: str) -> CheckResult:
    """Connect to the host that requested the check, and send it the time.

    Args:
        address: Its `host:port`.
        name: Name of this host in its host list.
        secret: Shared secret for authentication.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CALL_DEADLINE) as connection:
            source = connection.getsockname()[0]
            channel = Connection(connection, secret.encode(), Introduction(0, 0, name))
            connection.settimeout(CALL_DEADLINE)
            channel.send(HostTime(time.time()))
            channel.read()
    except (OSError, wire.AuthenticationError) as error:
        return CheckResult("route", PROBLEM, f"no connection to {address} on the first host ({error})",
                       "allow TCP connections between the hosts in the firewall, or choose the network with"
                       " HVKERAS_NETWORK_INTERFACES on the first host")
    return CheckResult("route", OK, f"{source} reaches {address} on the first host")


def names(others: Sequence[str]) -> CheckResult:
    """Check whether this host can resolve the others' names, and report the local address for each."""
    routes, unknown = [], []
    for other in others:
        try:
            routes.append(f"{other} from {address_towards(other)}")
        except UsageError:
            unknown.append(other)
    if unknown:
        return CheckResult("names", PROBLEM, f"no address here for {', '.join(unknown)}",
                       "add the hosts to DNS or /etc/hosts on every host")
    return CheckResult("names", OK, ", ".join(routes))


def check_hosts(hosts: Sequence[str], ssh: Ssh) -> dict[str, Report]:
    """Run the checks on every host.

    Args:
        hosts: Hosts other than this one.
        ssh: ssh settings.

    Returns:
        Report of each host.
    """
    with (_call_server(hosts) as call_server,
          concurrent.futures.ThreadPoolExecutor(len(hosts), "hvkeras-doctor") as pool):
        reports = dict(zip(hosts, pool.map(lambda host: _check(host, hosts, ssh, call_server), hosts), strict=True))
    for host, report in reports.items():
        if call_server is not None and host in call_server.handler.clocks:
            offset = call_server.handler.clocks[host]
            report["findings"].append(check_result("clock", f"{offset:+.3f} s against the first host",
                                                   "times in logs and traces cannot be compared"
                                                   if abs(offset) > MAX_CLOCK_OFFSET else "",
                                                   "timedatectl set-ntp true", NOTE))
    return reports


@contextlib.contextmanager
def _call_server(hosts: Sequence[str]) -> Iterator[CallServer | None]:
    """Accept connections during the checks; yield None if no host's name resolves, which `names` reports."""
    for host in hosts:
        with contextlib.suppress(UsageError):
            call_server = CallServer(host)
            break
    else:
        yield None
        return
    call_server.server.start()
    try:
        yield call_server
    finally:
        call_server.server.stop()


def _check(host: str, hosts: Sequence[str], ssh: Ssh, call_server: CallServer | None) -> Report:
    others = [other for other in hosts if other != host]
    command = [sys.executable, "-m", "hvkeras", "doctor", "--json", *(["--others", ",".join(others)] if others else [])]
    if call_server is not None:
        command += ["--call", "{}:{}".format(*call_server.server.address), "--called", host]
    line, secret = ssh.command_line(host, shlex.join(command)), "" if call_server is None else call_server.secret
    try:
        done = subprocess.run(line, capture_output=True, text=True, input=secret,
                              timeout=ssh.timeout + ANSWER_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        return _no_report(f"it did not answer within {ssh.timeout + ANSWER_DEADLINE:g} s", "try: " + shlex.join(line))
    with contextlib.suppress(ValueError, LookupError, TypeError):
        report = json.loads(done.stdout[done.stdout.index("{"):])["hosts"][0]
        return {"findings": [CheckResult(**row) for row in report["findings"]], "versions": report["versions"]}
    reason = next(iter((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]), f"code {done.returncode}")
    fix = "install the same Python and hvkeras there"
    if done.returncode == _NO_CONNECTION:
        fix = ("correct the name, or add it to DNS, /etc/hosts or ~/.ssh/config" if _UNKNOWN_NAME in reason else
               "let ssh connect without a password")
    return _no_report(f"hvkeras doctor cannot be run there over ssh ({reason})", f"{fix}, and try: {shlex.join(line)}")


def _no_report(found: str, fix: str) -> Report:
    return {"findings": [CheckResult("ssh", PROBLEM, found, fix)], "versions": {}}


def differences(versions: Mapping[str, Mapping[str, str]]) -> Iterator[CheckResult]:
    """Compare the versions that must be the same on all hosts.

    Args:
        versions: Installed versions of each host.

    Yields:
        A result for each difference, or one `ok` if there is none.
    """
    known = {host: own for host, own in versions.items() if own}
    first = next(iter(known.values()), {})
    differing = [part for part in first if len({own.get(part, "") for own in known.values()}) > 1]
    for part in differing:
        installed = ", ".join(f"{own.get(part) or 'none'} on {host}" for host, own in known.items())
        state = NOTE if part in ("Horovod", "MPI") else PROBLEM  # other backends do not need these
        yield CheckResult(part, state, installed, f"install the same {part} on every host")
    if not differing and len(known) > 1:
        yield CheckResult("versions", OK, f"the same on {len(known)} hosts")
