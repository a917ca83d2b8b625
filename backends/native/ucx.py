"""UCX, as the C++ library calls it: one link for each group of ranks on several hosts."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvkeras.backends.cpp_library import Code, Library, Status, declare
from hvkeras.errors import MachineError, PeerError, explain
from hvkeras.host.program import env


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
        declare(self._functions.hvkeras_ucx_load, ctypes.c_char_p, texts, checks=False)
        declare(self._functions.hvkeras_ucx_open, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int,
                ctypes.POINTER(ctypes.c_void_p), sizes, checks=False)
        declare(self._functions.hvkeras_ucx_connect, ctypes.c_int64, ctypes.c_int, ctypes.c_int, texts, sizes, texts,
                ctypes.c_uint32, ctypes.c_double, checks=False)
        declare(self._functions.hvkeras_ucx_measure, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_double,
                ctypes.POINTER(ctypes.c_double), checks=False)
        declare(self._functions.hvkeras_ucx_close, ctypes.c_int64)
        version = ctypes.c_char_p()
        # Read when UCX is loaded: it leaves signals (SIGHUP, too) and the process's memory functions as they are.
        with env(UCX_HANDLE_ERRORS="none", UCX_DEBUG_SIGNO="0", UCX_MEM_EVENTS="n"):
            status = self._functions.hvkeras_ucx_load(folder.encode(), ctypes.byref(version))
        if status.code is not Code.OK:
            raise MachineError(explain("The native engine must load UCX to reach other hosts", "install it again: pip"
                                       " install --force-reinstall libucx-cu12, or use the backend tfdist",
                                       folder=folder, error=status.text))
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
        status = self._functions.hvkeras_ucx_open(group, lines.encode(), hosts, ctypes.byref(address),
                                                  ctypes.byref(size))
        if status.code is not Code.OK:
            raise MachineError(explain("The native engine must open UCX on this host's network interfaces",
                                       "choose them with HVKERAS_NETWORK_INTERFACES", error=status.text,
                                       **settings))
        return ctypes.string_at(address.value or 0, size.value)

    def connect(self, group: int, host: int, addresses: Sequence[bytes], names: Sequence[str], mark: int,
                timeout: float) -> None:
        """Connects a group's link to all other hosts, which do the same at once.

        Args:
            group: The group's number.
            host: The index of this host in the following lists.
            addresses: The address of each end.
            names: The name of each end, for messages.
            mark: A number that tells this link's messages from those of others.
            timeout: Seconds to wait for the others.

        Raises:
            MachineError: A host cannot be reached.
            PeerError: A connection failed that had been there.
        """
        count = len(addresses)
        texts = ctypes.c_char_p * count
        _require_hosts(self._functions.hvkeras_ucx_connect(
            group, host, count, texts(*addresses), (ctypes.c_size_t * count)(*map(len, addresses)),
            texts(*(name.encode() for name in names)), mark, timeout))

    def measure(self, group: int, host: int, hosts: int, timeout: float) -> Costs | None:
        """Measures what messages to a neighbouring host cost; all hosts' ends do so at once, right after `connect`.

        Args:
            group: The group's number.
            host: The index of this host among the group's.
            hosts: The number of the group's hosts.
            timeout: Seconds that it may take.

        Returns:
            The costs, or None where the neighbour measures them, or there is none.

        Raises:
            MachineError: The neighbour is too slow.
            PeerError: The connection to the neighbour failed.
        """
        costs = (ctypes.c_double * 3)()
        _require_hosts(self._functions.hvkeras_ucx_measure(group, host, hosts, timeout, costs))
        return Costs(*costs) if costs[0] > 0 else None

    def close(self, group: int) -> None:
        """Closes a link that no group has taken over."""
        self._functions.hvkeras_ucx_close(group)


def _require_hosts(status: Status) -> None:
    if status.code is not Code.OK:
        family = PeerError if status.code is Code.PEER_FAILED else MachineError
        raise family(explain(
            f"The native engine must reach the other hosts: {status.text}", "let a firewall pass TCP between"
            " the job's hosts on all ports, and choose interfaces that reach all hosts with"
            " HVKERAS_NETWORK_INTERFACES"))
