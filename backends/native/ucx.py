"""Bindings of UCX in the C++ library: one link for each group of ranks on several hosts."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvkeras.backends.cpp_library import Code, Library, Status, declare
from hvkeras.errors import MachineError, PeerError, explain
from hvkeras.host.program import env


class Costs(NamedTuple):
    """Costs of messages between hosts, in seconds; see backends/native/core/costs.h.

    Attributes:
        latency: Time of the shortest message.
        per_message: Additional time of each further message that is sent at the same time.
        per_byte: Additional time of each byte.
    """

    latency: float = 25e-6
    per_message: float = 4e-6
    per_byte: float = 0.8e-9


class Ucx:
    """UCX in this process. It stays loaded until the process ends, and is idle without links.

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
        # Read when UCX is loaded: it must not replace signal handlers (also not of SIGHUP) or memory functions.
        with env(UCX_HANDLE_ERRORS="none", UCX_DEBUG_SIGNO="0", UCX_MEM_EVENTS="n"):
            status = self._functions.hvkeras_ucx_load(folder.encode(), ctypes.byref(version))
        if status.code is not Code.OK:
            raise MachineError(explain("The native engine must load UCX to reach other hosts", "install it again: pip"
                                       " install --force-reinstall libucx-cu12, or use the backend tfdist",
                                       folder=folder, error=status.text))
        self.version: str = (version.value or b"").decode()

    def open(self, group: int, settings: Mapping[str, str], hosts: int) -> bytes:
        """Open this rank's end of a group's link, without connecting it.

        Args:
            settings: Settings of UCX, without the prefix `UCX_`; they override the environment.
            hosts: The number of hosts that the link connects.

        Returns:
            UCX's address of this end.

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
        """Connect a group's link to all other hosts, which call this method at the same time.

        Args:
            host: The index of this host in the following lists.
            names: The name of each end, for messages.
            mark: A number that distinguishes this link's messages from those of others.
            timeout: Seconds to wait for the other hosts.

        Raises:
            MachineError: A host cannot be reached.
            PeerError: An established connection failed.
        """
        count = len(addresses)
        texts = ctypes.c_char_p * count
        _require_hosts(self._functions.hvkeras_ucx_connect(
            group, host, count, texts(*addresses), (ctypes.c_size_t * count)(*map(len, addresses)),
            texts(*(name.encode() for name in names)), mark, timeout))

    def measure(self, group: int, host: int, hosts: int, timeout: float) -> Costs | None:
        """Measure the costs of messages to a neighboring host. All hosts call this at the same time, after `connect`.

        Args:
            host: The index of this host among the group's.
            hosts: The number of the group's hosts.
            timeout: Timeout in seconds.

        Returns:
            The costs; None if the neighbor measures them, or if there is no neighbor.

        Raises:
            MachineError: The neighbor is too slow.
            PeerError: The connection to the neighbor failed.
        """
        costs = (ctypes.c_double * 3)()
        _require_hosts(self._functions.hvkeras_ucx_measure(group, host, hosts, timeout, costs))
        return Costs(*costs) if costs[0] > 0 else None

    def close(self, group: int) -> None:
        """Close a link that no group has taken over."""
        self._functions.hvkeras_ucx_close(group)


def _require_hosts(status: Status) -> None:
    if status.code is not Code.OK:
        error = PeerError if status.code is Code.PEER_FAILED else MachineError
        raise error(explain(
            f"The native engine must reach the other hosts: {status.text}", "let a firewall pass TCP between"
            " the job's hosts on all ports, and choose interfaces that reach all hosts with"
            " HVKERAS_NETWORK_INTERFACES"))
