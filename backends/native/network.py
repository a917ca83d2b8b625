"""The native engine's transport between hosts: a separate library, compiled for one MPI and loaded only if needed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from typing import TYPE_CHECKING

from hvkeras.cpp_library.paths import path_of
from hvkeras.errors import MachineError, explain
from hvkeras.host.mpi import mpi_world

if TYPE_CHECKING:
    from hvkeras.backends.interface import Start
    from hvkeras.launch_environments import Launch

PATH = path_of("libhvkeras_native_mpi.so")
_BUILD = re.compile(rb"hvkeras is built for ([^\0]+)\0")
LOST = "MPI cannot "  # prefix of the library's messages about MPI connection errors
_BUILD_AGAIN = "install hvkeras from its sources (pip install --force-reinstall --no-deps --no-binary hvkeras hvkeras)"
_OTHERS = "the backends horovod and tfdist work between hosts as well"


def objection_to_hosts(launch: Launch) -> str:
    """Explains what is missing for a job on several hosts; "" if nothing is missing."""
    if not PATH.is_file():
        return ("it works within one host, since no MPI was found when its library was built;"
                f" {_BUILD_AGAIN} where mpicc is found, and {_OTHERS}")
    if not launch.mpi:
        return f"between hosts it needs MPI, so the job must be launched by mpirun or mpiexec; {_OTHERS}"
    if importlib.util.find_spec("mpi4py") is None:
        return f"between hosts it needs mpi4py, built for the MPI of {launch.launcher}; {_OTHERS}"
    return ""


def mpi_of(text: str) -> tuple[str, str]:
    """Parses the family and the version of an MPI implementation from its description.

    Example:
        >>> mpi_of("Open MPI v4.1.8, package: Open MPI root@builder Distribution")
        ('Open MPI', '4.1.8')

    Args:
        text: The result of `MPI_Get_library_version`, or the description of the MPI that the library was built for.

    Returns:
        The name of the family and the version; the text and "" for an unknown family.
    """
    patterns = {"Open MPI": r"Open MPI v?(\d[\w.]*)", "Intel MPI": r"Intel(?:\(R\))? MPI(?: Library)? (\d[\d.]*)",
                "MPICH": r"MPICH(?: Version:)?\s+(\d[\w.]*)"}
    for family, pattern in patterns.items():
        if match := re.search(pattern, text):
            return family, match[1]
    return text.strip(), ""


def built_for() -> str:
    """Returns the MPI that the library was compiled for (`Open MPI 4.1.8`) without loading it; "" for none."""
    match = _BUILD.search(PATH.read_bytes()) if PATH.is_file() else None
    return match[1].decode() if match else ""


def require_built_for(running: str) -> str:
    """Checks that the running MPI matches the MPI that the library was compiled for.

    Args:
        running: The result of `MPI_Get_library_version`.

    Returns:
        The family and version of the running MPI.

    Raises:
        MachineError: The families or major versions differ.
    """
    found, built = mpi_of(running), mpi_of(built_for())
    if _kind(found) != _kind(built):
        raise MachineError(explain(
            "The native engine must run on the MPI that it was built for, since each numbers its types differently",
            f"{_BUILD_AGAIN} where the mpicc of {found[0]} is the first in the PATH, or use the backend horovod or"
            " tfdist",
            built_for=" ".join(built), running=" ".join(found)))
    return " ".join(found)


def _kind(mpi: tuple[str, str]) -> tuple[str, str]:
    """Returns the family and the major version, which for Intel MPI is a year or a number that begins with a year."""
    family, version = mpi
    return family, version[:4] if family == "Intel MPI" else version.split(".")[0]


class Network:
    """The running MPI, used by the leader of each host; all ranks of the job open it together.

    Args:
        start: The start parameters of the backend.

    Attributes:
        mpi: The running MPI, such as `Open MPI 4.1.8`.
        table: The address of the functions that the engine calls.

    Raises:
        MachineError: The library was built for a different MPI than the running one, or MPI is not usable.
        PeerError: Not all ranks arrived.
    """

    def __init__(self, start: Start) -> None:
        launch, timeout = start.launch, start.settings.start_timeout
        if objection := objection_to_hosts(launch):
            raise MachineError(explain(f"The native engine must reach the other hosts: {objection}",
                                       hosts=sorted(set(start.topology.hosts))))
        world = mpi_world(launch.launcher, launch.size, timeout)
        world.Free()
        from mpi4py import MPI

        self.mpi: str = require_built_for(MPI.Get_library_version())
        try:
            self._functions = ctypes.CDLL(str(PATH))
        except OSError as error:
            raise MachineError(explain("The native engine's library for MPI must load",
                                       f"{_BUILD_AGAIN} for this MPI", path=str(PATH), running=self.mpi,
                                       error=str(error))) from None
        self._functions.hvkeras_mpi_open.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double,
                                                     ctypes.POINTER(ctypes.c_void_p)]
        self._functions.hvkeras_mpi_open.restype = ctypes.c_char_p
        self._functions.hvkeras_mpi_close.restype = None
        table = ctypes.c_void_p()
        problem = self._functions.hvkeras_mpi_open(launch.rank, launch.size, timeout, ctypes.byref(table))
        if problem is not None:
            raise MachineError(explain(f"The native engine must reach the other hosts over MPI: {problem.decode()}",
                                       "let hvd.init() start MPI, or start it with MPI_THREAD_MULTIPLE",
                                       mpi=self.mpi))
        self.table: int = int(table.value or 0)

    def close(self) -> None:
        """Ends all use of MPI before the process finalizes it."""
        self._functions.hvkeras_mpi_close()
