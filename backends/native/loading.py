"""The C++ library of the native engine: its location, its availability, and its functions."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.backends.interface import Availability
from hvkeras.backends.native.libraries import path_of
from hvkeras.backends.native.network import built_for
from hvkeras.errors import MachineError, explain
from hvkeras.requirements import TENSORFLOW

Array = np.ndarray[Any, Any]

PATH = path_of("libhvkeras_native.so")
INSTALL = ("install hvkeras again where g++ (or clang++) and cmake are found, from the folder of its sources:"
           " pip install --force-reinstall --no-deps .")


def availability() -> Availability:
    """Reports whether the library was built, without loading it."""
    if importlib.util.find_spec("tensorflow") is None:
        return Availability(False, f"TensorFlow is not installed: {TENSORFLOW}")
    if not PATH.is_file():
        return Availability(False, f"its C++ library was not built, since no compiler was found; {INSTALL}")
    between = f"between hosts over {mpi}" if (mpi := built_for()) else "within one host, since it was built without MPI"
    return Availability(True, f"its C++ library is installed, and works {between}")


@functools.cache
def library() -> Library:
    """Loads the library, once per process.

    Raises:
        MachineError: The library cannot be loaded.
    """
    return Library()


class Library:
    """The loaded library.

    Raises:
        MachineError: The library cannot be loaded.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        # The operations use TensorFlow's C API, whose symbols are looked up among the global symbols of the process.
        folder = Path(tf.sysconfig.get_lib())
        try:
            ctypes.CDLL(str(folder / "libtensorflow_framework.so.2"), mode=ctypes.RTLD_GLOBAL)
            self.operations: Any = tf.load_op_library(str(PATH))
            self._functions = ctypes.CDLL(str(PATH))
        except (OSError, tf.errors.OpError) as error:
            raise MachineError(explain("The native engine's library must load", INSTALL, path=str(PATH),
                                       tensorflow=tf.__version__, error=str(error))) from error
        self._functions.hvkeras_open_group.argtypes = [
            ctypes.c_int64, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int32), ctypes.c_int]
        self._functions.hvkeras_open_group.restype = ctypes.c_char_p
        self._functions.hvkeras_close_group.argtypes = [ctypes.c_int64]
        self._functions.hvkeras_close_group.restype = None
        self._functions.hvkeras_use_network.argtypes = [ctypes.c_void_p]
        self._functions.hvkeras_use_network.restype = None
        self._functions.hvkeras_unlink.argtypes = self._functions.hvkeras_abort.argtypes = [ctypes.c_char_p]
        self._functions.hvkeras_unlink.restype = self._functions.hvkeras_abort.restype = None
        self._functions.hvkeras_instructions.restype = ctypes.c_char_p
        self._functions.hvkeras_register_xla.argtypes = self._functions.hvkeras_entered.argtypes = [ctypes.c_char_p]
        self._functions.hvkeras_register_xla.restype = ctypes.c_char_p
        self._functions.hvkeras_entered.restype = ctypes.c_int64
        self._functions.hvkeras_refuse.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._functions.hvkeras_refuse.restype = None
        self._functions.hvkeras_take_refusal.argtypes = [ctypes.c_char_p]
        self._functions.hvkeras_take_refusal.restype = ctypes.c_char_p
        self._functions.hvkeras_keep.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
        self._functions.hvkeras_keep.restype = None
        self._functions.hvkeras_kept.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self._functions.hvkeras_kept.restype = ctypes.c_int64
        reason = self._functions.hvkeras_register_xla(str(folder / "libtensorflow_cc.so.2").encode())
        self.objection_to_xla = "" if reason is None else f"TensorFlow's XLA does not take them: {reason.decode()}"

    def open_group(self, number: int, name: str, create: bool, rank: int, ranks: Sequence[int], hosts: Sequence[int],
                   crowded: bool) -> None:
        """Maps the shared memory of a group of ranks, and starts its engine.

        Args:
            number: The number that identifies the group in graphs.
            name: The name of the shared memory, the same for all ranks of a host.
            create: Whether this rank creates the memory; true on the first rank of each host.
            rank: This rank's place in the group.
            ranks: The group's global ranks.
            hosts: The host number of each rank.
            crowded: Whether there are more ranks than cores.

        Raises:
            MachineError: The shared memory is not available.
        """
        numbers = ctypes.c_int32 * len(ranks)
        error = self._functions.hvkeras_open_group(number, name.encode(), create, rank, len(ranks), numbers(*ranks),
                                                   numbers(*hosts), crowded)
        if error is not None:
            raise MachineError(explain(f"The native engine needs shared memory: {error.decode()}",
                                       "make room in /dev/shm, or use the backend tfdist"))

    def use_network(self, table: int) -> None:
        """Sets the functions by which groups communicate between hosts (see `network.Network`)."""
        self._functions.hvkeras_use_network(table)

    def close_group(self, number: int) -> None:
        """Stops a group's engine; collectives still in flight fail with an error."""
        self._functions.hvkeras_close_group(number)

    def unlink(self, name: str) -> None:
        """Unlinks the name of a shared memory, which persists as long as it is mapped."""
        self._functions.hvkeras_unlink(name.encode())

    def abort(self, reason: str) -> None:
        """Makes all collectives of this process fail with an error."""
        self._functions.hvkeras_abort(reason.encode())

    def entered(self, key: str) -> int:
        """Returns how often compiled functions of this process have entered a plan."""
        return int(self._functions.hvkeras_entered(key.encode()))

    def refuse(self, key: str, text: str) -> None:
        """Makes the operation `hvkeras_refusable` of this key fail the next time it runs."""
        self._functions.hvkeras_refuse(key.encode(), text.encode())

    def take_refusal(self, key: str) -> bool:
        """Revokes a call of `refuse`; returns False if the operation has failed already."""
        return self._functions.hvkeras_take_refusal(key.encode()) is not None

    def keep(self, key: str, columns: int, capacity: int) -> None:
        """Starts recording the latest rows of a key: of a collective (begin and end), or of `hvkeras_note`."""
        self._functions.hvkeras_keep(key.encode(), columns, capacity)

    def kept(self, key: str, columns: int, capacity: int) -> tuple[Array, int]:
        """Returns the rows of a key, oldest first, and the oldest row's number; arguments as for `keep`."""
        rows = np.zeros((capacity, columns))
        count = int(self._functions.hvkeras_kept(key.encode(), rows.ctypes.data))
        return rows[: min(count, capacity)], max(0, count - capacity)

    @cached_property
    def instructions(self) -> str:
        """The instruction set that reductions use."""
        return str(self._functions.hvkeras_instructions().decode())
