"""Bindings of the native engine in the C++ library: groups of ranks, and XLA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hvkeras.backends.cpp_library import Array, Code, Library, declare
from hvkeras.backends.native.ucx import Costs
from hvkeras.errors import MachineError, explain


class Engine:
    """The engine in a loaded library.

    Attributes:
        objection_to_xla: Reason why XLA cannot compile them; "" if it can.
    """

    def __init__(self, library: Library) -> None:
        self._library, self._functions = library, library.functions
        self.operations: Any = library.operations
        numbers = ctypes.POINTER(ctypes.c_int32)
        declare(self._functions.hvkeras_open_group, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int, ctypes.c_int,
                ctypes.c_int, numbers, numbers, ctypes.c_int, ctypes.POINTER(ctypes.c_double), checks=False)
        declare(self._functions.hvkeras_close_group, ctypes.c_int64, ctypes.c_char_p)
        declare(self._functions.hvkeras_unlink, ctypes.c_char_p)
        declare(self._functions.hvkeras_abort, ctypes.c_char_p)
        for function in (self._functions.hvkeras_read_errors, self._functions.hvkeras_write_errors):
            function.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
            function.restype = ctypes.c_bool
        self._functions.hvkeras_instructions.restype = ctypes.c_char_p
        self._functions.hvkeras_peer_has_failed.argtypes, self._functions.hvkeras_peer_has_failed.restype = (
            [], ctypes.c_bool)
        declare(self._functions.hvkeras_register_xla, ctypes.c_char_p, checks=False)
        self._functions.hvkeras_entered.argtypes = [ctypes.c_char_p]
        self._functions.hvkeras_entered.restype = ctypes.c_int64
        status = self._functions.hvkeras_register_xla(str(library.folder / "libtensorflow_cc.so.2").encode())
        self.objection_to_xla: str = (
            "" if status.code is Code.OK else f"TensorFlow's XLA does not accept them: {status.text}")

    def open_group(self, number: int, name: str, create: bool, rank: int, ranks: Sequence[int], hosts: Sequence[int],
                   oversubscribed: bool, costs: Costs) -> None:
        """Map the shared memory of a group of ranks, and start its engine.

        With several hosts, the first rank of each host must have connected the group's link.

        Args:
            number: The number that identifies the group in graphs.
            name: The name of the shared memory, the same for all ranks of a host.
            create: Whether this rank creates the memory; true on the first rank of each host.
            rank: This rank's index in the group.
            hosts: The host number of each rank.
            oversubscribed: Whether there are more ranks than cores.
            costs: Costs of messages between hosts, the same on all ranks.

        Raises:
            MachineError: Not enough shared memory, files or threads are available.
        """
        numbers = ctypes.c_int32 * len(ranks)
        status = self._functions.hvkeras_open_group(number, name.encode(), create, rank, len(ranks), numbers(*ranks),
                                                    numbers(*hosts), oversubscribed, (ctypes.c_double * 3)(*costs))
        if status.code is not Code.OK:
            raise MachineError(explain(f"The native engine must be able to open a group of ranks: {status.text}",
                                       "free space in /dev/shm, or raise the limit on files (ulimit -n) or processes"
                                       " (ulimit -u); or use the backend tfdist"))

    def close_group(self, number: int, reason: str) -> None:
        """Stop a group's engine. Collectives still in flight fail with an error, whose text is the reason."""
        self._functions.hvkeras_close_group(number, reason.encode())

    def unlink(self, name: str) -> None:
        """Unlink the name of a shared memory, which persists while it is mapped."""
        self._functions.hvkeras_unlink(name.encode())

    def abort(self, reason: str) -> None:
        """Fail all collectives of this process with an error, because another rank has failed."""
        self._functions.hvkeras_abort(reason.encode())

    @property
    def peer_has_failed(self) -> bool:
        """True if collectives fail because of `abort`, or because the connection to another host failed."""
        return bool(self._functions.hvkeras_peer_has_failed())

    def read_errors(self, number: int, key: str, count: int) -> Array | None:
        """Return a copy of this rank's rounding errors of a compressed allreduce; None if it has none."""
        errors = np.empty(count, np.float32)
        found = self._functions.hvkeras_read_errors(number, key.encode(), errors.ctypes.data, count)
        return errors if found else None

    def write_errors(self, number: int, key: str, errors: Array) -> bool:
        """Replace this rank's rounding errors of a compressed allreduce, or free them if there are none.

        Returns:
            Whether its group is open.
        """
        values = np.ascontiguousarray(errors, np.float32)
        return bool(self._functions.hvkeras_write_errors(number, key.encode(), values.ctypes.data, values.size))

    def entered(self, key: str) -> int:
        """Return how often compiled functions of this process have entered a plan."""
        return int(self._functions.hvkeras_entered(key.encode()))

    def keep_times(self, key: str, capacity: int) -> None:
        """Start recording when the most recent runs of a collective begin and end."""
        self._library.start_recording(key, 2, capacity)

    def times(self, key: str, capacity: int) -> tuple[Array, int]:
        """Return the recorded runs, oldest first, and the index of the oldest one."""
        return self._library.read_recording(key, 2, capacity)

    @cached_property
    def instructions(self) -> str:
        """Instruction set that reductions use."""
        return str(self._functions.hvkeras_instructions().decode())
