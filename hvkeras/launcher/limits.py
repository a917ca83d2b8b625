"""What a launcher needs from its machine: a current folder, open files, processes and memory."""

from __future__ import annotations

import errno
import os
import resource

from hvkeras.errors import MachineError, UsageError, explain

FILES_OF_A_LAUNCHER = 40  # open files besides those for ranks and hosts: Python's, asyncio's, a report's
FILES_OF_A_HOST = 4  # three pipes, and one that is open while its agent starts
_FIXES = {
    errno.EMFILE: "raise the limit of open files, which ulimit -n shows, or lower -np",
    errno.ENFILE: "end other programs: the whole machine has no more open files left",
    errno.EAGAIN: "lower -np, or raise the limit of processes: ulimit -u, and that of a container or a service",
    errno.ENOMEM: "lower -np, or free memory",
}
RESOURCE_ERRORS = frozenset(_FIXES)  # the operating system's error numbers for an exhausted resource


def out_of_resources(error: OSError) -> str:
    """Describes an error whose number is in `RESOURCE_ERRORS`."""
    return explain(f"This machine must have room for the job ({os.strerror(error.errno or 0)})",
                   how_to_free_resources(error.errno or 0))


def how_to_free_resources(number: int) -> str:
    """Returns the fix for an error number of the operating system; "" if it is not in `RESOURCE_ERRORS`."""
    return _FIXES.get(number, "")


def require_current_folder() -> None:
    """Checks that the current folder exists.

    Raises:
        UsageError: It was removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(explain(f"The current folder must exist ({error.strerror}): it was removed", "cd to"
                                 " another one", PWD=os.environ.get("PWD"))) from None


def require_open_files(ranks: int, hosts: int) -> None:
    """Checks that a launcher may open as many files as its job needs.

    Args:
        ranks: The number of ranks that connect to it.
        hosts: The number of agents that it talks to.

    Raises:
        MachineError: The limit of open files is too low.
    """
    needed = FILES_OF_A_LAUNCHER + FILES_OF_A_HOST * hosts + ranks
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= allowed < needed:
        raise MachineError(explain(f"A launcher of {ranks} rank{'s' * (ranks > 1)} needs {needed} open files",
                                   f"ulimit -n {needed}, or lower -np", allowed=allowed))
