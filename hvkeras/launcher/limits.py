"""Resources of a launcher: the current folder, open files, processes, memory, and the parent process."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
from collections.abc import Callable
from pathlib import Path

from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.machine import core_limit, oversubscription, usable_cores

LAUNCHER_FILES = 40  # open files of Python, asyncio and the report, besides those for ranks and hosts
HOST_FILES = 4  # three pipes, and one more while its agent starts
AGENT_FILES = 20  # open files of Python, spare ones, and those of a starting rank, besides two pipes per rank
_FIXES = {
    errno.EMFILE: "raise the limit of open files, which ulimit -n shows, or lower -np",
    errno.ENFILE: "end other programs: the whole machine has no more open files left",
    errno.EAGAIN: "lower -np, or raise the limit of processes: ulimit -u, and that of a container or a service",
    errno.ENOMEM: "lower -np, or free memory",
}
_NVIDIA = Path("/dev/nvidiactl")
RESOURCE_ERRORS = frozenset(_FIXES)  # errno values of exhausted resources


def out_of_resources(error: OSError) -> str:
    """Return the error message for an error whose errno is in `RESOURCE_ERRORS`."""
    return explain(f"This machine must have room for the job ({os.strerror(error.errno or 0)})",
                   how_to_free_resources(error.errno or 0))


def how_to_free_resources(number: int) -> str:
    """Return a hint for an errno; "" if it is not in `RESOURCE_ERRORS`."""
    return _FIXES.get(number, "")


def require_current_folder() -> None:
    """Check that the current folder exists.

    Raises:
        UsageError: The current folder was removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(explain(f"The current folder must exist ({error.strerror}): it was removed", "cd to"
                                 " another one", PWD=os.environ.get("PWD"))) from None


def note_oversubscription(here: int, show: Callable[[str], None]) -> None:
    """Report that the ranks on this host have to share its cores, unless they may compute on GPUs.

    Args:
        here: Number of ranks on this host.
        show: Prints a line.
    """
    cores = core_limit(len(usable_cores()))
    if (text := oversubscription(here, cores)) and not _NVIDIA.exists():
        show(f"hvkeras run: {text}. HINT: -np {max(1, int(cores))}, or more hosts (-H)")


def require_open_files(ranks: int, hosts: int, here: int, more: int = 0, ports: bool = False) -> None:
    """Check that the launcher, and the agent on this host, may open as many files as the job needs.

    If necessary and allowed, raise the soft limit of this process. `restore_open_files` restores it for a child
    process. Agents raise their own limits.

    Args:
        hosts: The number of hosts, each with an agent.
        here: The number of ranks on this host.
        more: The number of other open files of the launcher.
        ports: Whether agents reserve a port for each rank.

    Raises:
        MachineError: The limit of open files is too low.
    """
    soft, hard = _limit_at_start()
    needed = LAUNCHER_FILES + HOST_FILES * hosts + ranks + more
    of_agent = AGENT_FILES + (3 if ports else 2) * here
    for who, count, files in (("A launcher", ranks, needed), ("The agent", here, of_agent)):
        if 0 <= hard < files:
            raise MachineError(explain(f"{who} of {count} rank{'s' * (count > 1)} needs {files} open files",
                                       f"ulimit -n {files}, or lower -np", allowed=hard))
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def restore_open_files(pid: int) -> None:
    """Restore the original limit of open files for a child process."""
    if resource.getrlimit(resource.RLIMIT_NOFILE) != _limit_at_start():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _limit_at_start())


@functools.cache
def _limit_at_start() -> tuple[int, int]:  # soft and hard; first called before the limits are changed
    return resource.getrlimit(resource.RLIMIT_NOFILE)


# Sends SIGTERM, on which `hvkeras run` ends its ranks, when the parent dies.
# 1 is PR_SET_PDEATHSIG from <linux/prctl.h>.
_PROGRAM = """import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != {parent}:
    raise SystemExit(128 + signal.SIGTERM)
"""


def ends_with_parent() -> str:
    """Return the first lines of a child's Python program, which send it SIGTERM when this process dies."""
    return _PROGRAM.format(parent=os.getpid())
