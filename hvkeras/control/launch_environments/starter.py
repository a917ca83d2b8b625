"""The process that started this rank: mpirun, or its equivalent on this host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from hvkeras.control.launch_environments import hydra, open_mpi, slurm, torchrun

# One variable of each launcher, of which a step of Slurm's may start the others. `hvkeras run` and horovodrun are left
# out: they look after their ranks themselves.
_OWN = (open_mpi.PROCESS_ID, hydra.PROCESS_ID, torchrun.RUN, slurm.STEP)


def open_starter(environ: Mapping[str, str] | None = None) -> int | None:
    """Opens the nearest ancestor process that lacks a rank's variables: the launcher, which sets them for others.

    Args:
        environ: The environment to read; this process's by default.

    Returns:
        A descriptor that becomes readable when the launcher ends; None if there is none to watch.
    """
    environ = os.environ if environ is None else environ
    own = next((name for name in _OWN if environ.get(name)), None)
    pid = os.getppid() if own is not None else 1
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):  # pidfd_open came with Linux 5.3
        while pid > 1:
            descriptor = os.pidfd_open(pid)
            if not _has(pid, f"{own}="):
                return descriptor
            os.close(descriptor)
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
    return None


def _has(pid: int, variable: str) -> bool:
    """Returns whether a process was started with a variable; False for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(variable.encode()) for entry in file.read().split(b"\0"))
    except PermissionError:
        return False
