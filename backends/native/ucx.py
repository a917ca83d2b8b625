"""UCX, as the C++ library calls it: one link for each group of ranks on several hosts."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvkeras.cpp_library.loading import Library, declare
from hvkeras.errors import MachineError, explain
from hvkeras.host.environment import env


class Costs(NamedTuple):
    """What messages between hosts cost, in seconds: see backends/native/core/costs.h.

    Attributes:
        latency: The time of the shortest message.
        per_message: What a further message at the same time adds.
        per_byte: What each byte adds.
    """

    latency: float = 25e-6
    per_message: float = 4e-6
    per_byte: float = 0.8e-9


class Ucx:
    """UCX in this process; it stays loaded until the process ends, and does nothing without links.

    Args:
        library: The C++ library.
        folder: The folder with UCX's libraries.

    Attributes:
        version: UCX's version, such as `1.22.0`.

    Raises:
        MachineError: UCX cannot be loaded.
    """

    def __init__(self, library: Library, folder: str) -> None:
        self._functions = library.functions
        texts, sizes = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)
        self._functions.hvkeras_ucx_load.argtypes = [ctypes.c_char_p, texts]
        self._functions.hvkeras_ucx_open.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int,
                                                     ctypes.POINTER(ctypes.c_void_p), sizes]
        self._functions.hvkeras_ucx_connect.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, texts, sizes, texts,
                                                        ctypes.c_uint32, ctypes.c_double]
        self._functions.hvkeras_ucx_measure.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_double,
                                                        ctypes.POINTER(ctypes.c_double)]
        for function in (self._functions.hvkeras_ucx_load, self._functions.hvkeras_ucx_open,
                         self._functions.hvkeras_ucx_connect, self._functions.hvkeras_ucx_measure):
            function.restype = ctypes.c_char_p
        declare(self._functions.hvkeras_ucx_close, ctypes.c_int64)
        version = ctypes.c_char_p()
        # Read when UCX is loaded: it leaves signals (SIGHUP, too) and the process's memory functions as they are.
        with env(UCX_HANDLE_ERRORS="none", UCX_DEBUG_SIGNO="0", UCX_MEM_EVENTS="n"):
            problem = self._functions.hvkeras_ucx_load(folder.encode(), ctypes.byref(version))
        if problem is not None:
            raise MachineError(explain("The native engine must load UCX to reach other hosts", "install it again: pip"
                                       " install --force-reinstall libucx-cu12, or use the backend tfdist",
                                       folder=folder, error=problem.decode()))
        self.version: str = (version.value or b"").decode()

    def open(self, group: int, settings: Mapping[str, str], hosts: int) -> bytes:
        """Opens this rank's end of a group's link, without connecting it.

        Args:
            group: The group's number.
            settings: Settings of UCX, without the prefix `UCX_`; they replace those of the environment.
            hosts: The number of hosts that the link connects.

        Returns:
            The address at which UCX on other hosts reaches this end.

        Raises:
            MachineError: UCX cannot use the chosen interfaces.
        """
        lines = "\n".join(f"{name}={value}" for name, value in settings.items())
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        problem = self._functions.hvkeras_ucx_open(group, lines.encode(), hosts, ctypes.byref(address),
                                                   ctypes.byref(size))
        if problem is not None:
            raise MachineError(explain("The native engine must open UCX on this host's network interfaces",
                                       "choose them with HVKERAS_NETWORK_INTERFACES", error=problem.decode(),
                                       **settings))
        return ctypes.string_at(address.value or 0, size.value)

    def connect(self, group: int, host: int, addresses: Sequence[bytes], names: Sequence[str], mark: int,
                timeout: float) -> None:
        """Connects a group's link to all other hosts, which do the same at once.

        Args:
            group: The group's number.
            host: The place of this host in the following lists.
            addresses: The address of each end.
            names: The name of each end, for messages.
            mark: A number that tells this link's messages from those of others.
            timeout: Seconds to wait for the others.

        Raises:
            MachineError: A host cannot be reached.
        """
        count = len(addresses)
        texts = ctypes.c_char_p * count
        problem = self._functions.hvkeras_ucx_connect(
            group, host, count, texts(*addresses), (ctypes.c_size_t * count)(*map(len, addresses)),
            texts(*(name.encode() for name in names)), mark, timeout)
        _require_hosts(problem)

    def measure(self, group: int, host: int, hosts: int, timeout: float) -> Costs | None:
        """Measures what messages to a neighbouring host cost; all hosts' ends do so at once, right after `connect`.

        Args:
            group: The group's number.
            host: The place of this host among the group's.
            hosts: The number of the group's hosts.
            timeout: Seconds that it may take.

        Returns:
            The costs, or None where the neighbour measures them, or there is none.

        Raises:
            MachineError: The neighbour cannot be reached any more, or is too slow.
        """
        costs = (ctypes.c_double * 3)()
        _require_hosts(self._functions.hvkeras_ucx_measure(group, host, hosts, timeout, costs))
        return Costs(*costs) if costs[0] > 0 else None

    def close(self, group: int) -> None:
        """Closes a link that no group has taken over."""
        self._functions.hvkeras_ucx_close(group)


def _require_hosts(problem: bytes | None) -> None:
    if problem is not None:
        raise MachineError(explain(
            f"The native engine must reach the other hosts: {problem.decode()}", "let a firewall pass TCP between"
            " the job's hosts on all ports, and choose interfaces that reach all hosts with"
            " HVKERAS_NETWORK_INTERFACES"))
