"""Checks of the machine: cores, memory, shared memory, open files, ports, host name, proxies."""

from __future__ import annotations

import ipaddress
import math
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hvkeras.backends.native import NativeBackend
from hvkeras.host.machine import SHARED_MEMORY, SharedMemory, core_quota, usable_cores
from hvkeras.host.network import LOOPBACK

OK, NOTE, PROBLEM = "ok", "note", "problem"  # a note affects some jobs; a problem prevents jobs, or a backend


@dataclass(frozen=True)
class CheckResult:
    """Result of one check, a row of the table.

    Attributes:
        state: `ok`, `note` or `problem`.
        found: Finding, and why it matters.
        fix: Suggested fix, or "".
    """

    check: str
    state: str
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON-serializable dict."""
        return asdict(self)


def check_result(check: str, found: str, objection: str = "", fix: str = "", state: str = PROBLEM) -> CheckResult:
    """Return a result that is `ok` without an objection, else has `state` and the objection."""
    return CheckResult(check, state, f"{found}: {objection}", fix) if objection else CheckResult(check, OK, found)


MIB = 1024**2
COMFORTABLE_SHARED = 64 * MIB  # for many ranks of the native backend, or process sets
LEAST_MEMORY = 2048 * MIB  # for two ranks with TensorFlow and a small model
LEAST_FILES = 1024
_CONNECT_DEADLINE = 2.0
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def findings(environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check this machine.

    Args:
        environ: Environment variables, which may set proxies.

    Yields:
        A result for each check.
    """
    yield cores()
    yield memory()
    yield shared_memory()
    yield open_files()
    yield ports()
    yield name()
    yield proxies(environ)


def cores() -> CheckResult:
    """Check the number of cores that this process may use."""
    allowed = len(usable_cores())
    quota = core_quota()
    text = f"{allowed} of {psutil.cpu_count()}"
    return check_result("cores", text, f"the container's quota is {quota:g}" if quota and quota < allowed else "",
                        f"start no more than {max(1, int(quota))} ranks here, or raise the quota", NOTE)


def memory() -> CheckResult:
    """Check the available memory."""
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    return check_result("memory", f"{free / MIB:,.0f} of {total / MIB:,.0f} MiB free",
                        "a rank takes about 1 GiB with a small model" if free < LEAST_MEMORY else "",
                        "start fewer ranks, or end the programs that use the memory", NOTE)


def shared_memory(folder: Path = SHARED_MEMORY) -> CheckResult:
    """Check the free space for shared memory between the ranks of a host."""
    memory = SharedMemory.here(folder)
    if not memory.size:
        return CheckResult("shared memory", PROBLEM, f"{folder} cannot be used: the backend native needs it",
                           f"mount -t tmpfs tmpfs {folder}, or HVKERAS_BACKEND=tfdist")
    ranks, found = max(2, len(usable_cores())), f"{memory.text()} in {folder}"
    least, all_cores = NativeBackend.shared_memory(2, 1), NativeBackend.shared_memory(ranks, 1)
    if least > memory.free:
        return CheckResult("shared memory", PROBLEM, f"{found}: 2 ranks of the backend native need"
                           f" {math.ceil(least / MIB)} MiB; without them, auto uses another backend",
                           memory.fix(least))
    comfortable = max(COMFORTABLE_SHARED, all_cores)
    return check_result("shared memory", found, f"{ranks} ranks need {math.ceil(all_cores / MIB)} MiB with the backend"
                        " native, and as much again for each process set" if memory.free < comfortable else "",
                        memory.fix(comfortable), NOTE)


def open_files() -> CheckResult:
    """Check the limit of open files and connections per process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = limit != resource.RLIM_INFINITY and limit < LEAST_FILES
    return check_result("open files", "no limit" if limit == resource.RLIM_INFINITY else f"up to {limit:,} per process",
                        "jobs of many ranks and datasets of many files need more" if few else "",
                        f"ulimit -n {LEAST_FILES * 4}", NOTE)


def ports() -> CheckResult:
    """Check whether processes on this machine can connect to each other over TCP."""
    fix = f"allow TCP connections to {LOOPBACK} in the firewall"
    try:
        with socket.create_server((LOOPBACK, 0)) as server, \
                socket.create_connection(server.getsockname(), _CONNECT_DEADLINE):
            number = server.getsockname()[1]
    except OSError as error:
        return CheckResult("ports", PROBLEM, f"no connection within this machine ({error})", fix)
    return CheckResult("ports", OK, f"connections within this machine work (tried port {number})")


def name() -> CheckResult:
    """Check whether this machine's host name resolves."""
    own = socket.gethostname()
    try:
        address = socket.gethostbyname(own)
    except OSError as error:
        return CheckResult("host name", NOTE, f"{own} has no address ({error}), which multi-host jobs need",
                           f"add a line for {own} to /etc/hosts, or set HVKERAS_NETWORK_INTERFACES")
    loopback = ipaddress.ip_address(address).is_loopback
    return CheckResult("host name", OK, f"{own} is {address}" + (
        "; between hosts, the address of the default route is used" if loopback else ""))


def proxies(environ: Mapping[str, str]) -> CheckResult:
    """Check whether a proxy would intercept connections between TensorFlow workers; hvkeras's backends avoid it."""
    found = [name for name in (*_PROXIES, *map(str.upper, _PROXIES)) if environ.get(name)]
    excluded = environ.get("no_proxy") or environ.get("NO_PROXY") or environ.get("no_grpc_proxy") or ""
    text = ", ".join(found) + (f"; not for {excluded}" if excluded else "") if found else "none"
    return check_result("proxies", text, "strategies of tf.distribute would also use them between workers"
                        if found and not excluded else "", "name the hosts of the job in no_proxy", NOTE)
