"""UCX's port, which proves nobody's identity: who reaches it, and who has.

UCX listens on a port of its own while the leaders of a group's hosts connect, and takes whoever comes for one of them.
So packets reach the port from the job's hosts alone, from nowhere once all leaders are connected, and every connection
must be one that a leader knows: leaders compare their connections over the control channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hvkeras.errors import MachineError, explain

_SO_ATTACH_FILTER, _SO_ACCEPTCONN = 26, 30
_NETWORK_HEADER = 0x100000000 - 0x100000  # where a filter of a TCP socket finds the packet's IP header
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALL = 0xFFFFFFFF
_ESTABLISHED = 1
# Seconds in which UCX accepts who has arrived, and closes the second one of two connections made at once.
_CLOSING = 2.0

Instruction = tuple[int, int, int, int]  # code, steps if true, steps if false, value
Connection = list[str]  # of an end's own address and port, and the other end's


class Ports:
    """The TCP ports that UCX opens for one link, and the connections to them.

    Create it before the link, since it tells UCX's sockets from those that the process has already.
    """

    def __init__(self) -> None:
        self._before = _inodes()
        self._listening: list[socket.socket] = []
        self._names: set[str] = set()

    def admit(self, addresses: Sequence[str]) -> None:
        """Finds the ports that UCX has opened, and lets packets from these addresses alone reach them."""
        for one in self._opened():
            if one.getsockopt(socket.SOL_SOCKET, _SO_ACCEPTCONN):
                self._listening.append(one)
            else:
                one.close()
        self._names = {_name(one.getsockname()) for one in self._listening}
        for one in self._listening:
            _attach(one, [*_sources(one.family, addresses), (_RETURN, 0, 0, 0)])

    def close(self) -> None:
        """Lets no packet reach the ports any more; the connections that exist go on."""
        for one in self._listening:
            _attach(one, [(_RETURN, 0, 0, 0)])
            deadline = time.monotonic() + _CLOSING
            while _has_arrivals(one) and time.monotonic() < deadline:
                time.sleep(0.001)
            one.close()  # this is our descriptor; UCX has another one
        self._listening = []

    def connections(self) -> list[Connection]:
        """Returns the connections that exist: UCX's, and perhaps others that were made since."""
        found = []
        for one in self._opened():
            with one:
                if _is_established(one):
                    found.append([_name(one.getsockname()), _name(one.getpeername())])
        return found

    def require_known(self, others: Sequence[Sequence[Connection]]) -> None:
        """Checks that each connection to the ports comes from a leader.

        Args:
            others: The connections of each leader, as `connections` has returned them there.

        Raises:
            MachineError: Some other process has connected.
        """
        known = {(theirs, own) for connections in others for own, theirs in connections}
        deadline = time.monotonic() + _CLOSING
        while strangers := [(own, other) for own, other in self.connections()
                            if own in self._names and (own, other) not in known]:
            if time.monotonic() > deadline:
                raise MachineError(explain(
                    "Only ranks of the job may connect to the native engine's port, but another process has", "keep"
                    " other users off the job's hosts, and let nothing between them change addresses (no NAT)",
                    port=strangers[0][0], connected_from=strangers[0][1]))
            time.sleep(0.01)

    def _opened(self) -> Iterator[socket.socket]:
        """Yields the TCP sockets that were opened since, with descriptors of their own, which the caller closes."""
        for descriptor, inode in _inodes().items():
            if self._before.get(descriptor) == inode:
                continue
            with contextlib.suppress(OSError):
                one = socket.socket(fileno=os.dup(descriptor))
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield one
                else:
                    one.close()


def _inodes() -> dict[int, int]:
    """The sockets of this process, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            state = os.fstat(int(name))
            if stat.S_ISSOCK(state.st_mode):
                found[int(name)] = state.st_ino
    return found


def _sources(family: int, addresses: Sequence[str]) -> Iterator[Instruction]:
    """A filter's instructions that let packets from these addresses pass, and go on with others."""
    version, start = (4, 12) if family == socket.AF_INET else (6, 8)
    for address in map(ipaddress.ip_address, addresses):
        if address.version != version:
            continue
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        for place, word in enumerate(words):
            left = 2 * (len(words) - 1 - place) + 1  # instructions of this address after the comparison
            yield _LOAD, 0, 0, _NETWORK_HEADER + start + 4 * place
            yield _EQUAL, 0, left, word
        yield _RETURN, 0, 0, _ALL


def _attach(one: socket.socket, instructions: Sequence[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    filters = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    try:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)
    except PermissionError as error:
        raise MachineError(explain("The kernel must let the native engine choose which hosts reach its ports", "start"
                                   " the job as root, or choose another backend, such as tfdist",
                                   user=os.getuid(), error=error.strerror)) from error


def _name(address: tuple[Any, ...]) -> str:
    return f"{address[0]}:{address[1]}"


def _is_established(one: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    return False


def _has_arrivals(listening: socket.socket) -> bool:
    """Whether there are connections that were not accepted yet."""
    (arrivals,) = struct.unpack_from("@I", listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)
    return bool(arrivals)
