"""UCX's port, which proves nobody's identity: who reaches it, and who has.

UCX listens on a port of its own while the leaders of a group's hosts connect, and takes whoever comes for one of them.
So packets reach the port from the job's hosts alone, from nowhere once all leaders are connected, and every connection
must be one that a leader has made: leaders compare their connections over the control channel. UCX is told which port
to take, which distinguishes its sockets from all others of the process.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import hashlib
import ipaddress
import os
import random
import re
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hvkeras.errors import MachineError, UsageError, explain

RANGE = "UCX_TCP_PORT_RANGE"  # UCX's own variable: the ports from which users have one chosen
_SO_ATTACH_FILTER = 26
# Where a filter of a TCP socket finds the packet's IP header, and where in it the sender's address is.
_NETWORK_HEADER = 0x100000000 - 0x100000
_SOURCE = {4: _NETWORK_HEADER + 12, 6: _NETWORK_HEADER + 8}
_LOAD, _JUMP, _EQUAL, _GREATER, _AT_LEAST, _RETURN = 0x20, 0x05, 0x15, 0x25, 0x35, 0x06
_ALL = 0xFFFFFFFF
_MOST_INSTRUCTIONS = 4096
_MOST_IN_TURN = 32  # so many addresses are compared one by one; jumps of comparisons reach 255 instructions
_LISTENING, _ESTABLISHED = "0A", "01"
# Seconds in which UCX accepts who has arrived, and closes the second one of two connections made at once.
_CLOSING = 2.0
_TRIES = 100  # for a port that is free on all interfaces
_CLAIM_BYTES = 6

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Instruction = tuple[int, int, int, int]  # code, steps if true, steps if false, value
# The addresses of a network: for each word the first and the last value, without words that may be anything.
Range = list[tuple[int, int]]
# Values of a word, and what admits those of which further words must fit.
Choice = tuple[int, int, list[Instruction]]
_ADMIT: Instruction = (_RETURN, 0, 0, _ALL)
_DROP: Instruction = (_RETURN, 0, 0, 0)


class _Socket(NamedTuple):
    """A TCP socket of this process: its descriptor, state and ends, as `address:port`."""

    descriptor: int
    state: str
    own: str
    other: str


class Ports:
    """The TCP port of one link, on which UCX listens with a socket for each interface, and the connections to it.

    Attributes:
        number: The port that UCX must be told to take. It was free when this was created.
        names: The sockets that listen there, as `address:port`; empty before `admit`.

    Raises:
        UsageError: The variable UCX_TCP_PORT_RANGE is no range of ports.
        MachineError: No port is free.
    """

    def __init__(self) -> None:
        self.number: int = _free_port()
        self.names: list[str] = []
        self._listening: list[socket.socket] = []

    @property
    def is_free(self) -> bool:
        """Whether nobody has the port."""
        return _is_free(self.number)

    def admit(self, addresses: Collection[str]) -> None:
        """Lets packets from these addresses alone reach the port on which UCX listens.

        Where they are more than the kernel lets a filter compare, the smallest networks around them for which there is
        room are admitted.

        Raises:
            MachineError: The kernel takes no filter.
        """
        with _explained():
            for found in _tcp_sockets():
                if found.state == _LISTENING and _port_of(found.own) == self.number:
                    self._listening.append(socket.socket(fileno=os.dup(found.descriptor)))
                    self.names.append(found.own)
            for one in self._listening:
                _admit(one, addresses)

    def close(self) -> None:
        """Lets no packet reach the port any more; the connections that exist go on."""
        for one in self._listening:
            with one, _explained():  # this is our descriptor; UCX has another one
                _attach(one, [_DROP])
                deadline = time.monotonic() + _CLOSING
                while _has_arrivals(one) and time.monotonic() < deadline:
                    time.sleep(0.001)
        self._listening = []

    def claims(self, names: Collection[str]) -> str:
        """Returns which connections this process has made to the ports of these names, for `require_claimed` there."""
        return base64.b64encode(b"".join(
            _claim(one.own, one.other) for one in _tcp_sockets() if one.other in names)).decode()

    def require_claimed(self, claims: Sequence[str]) -> None:
        """Checks that each connection to the port comes from a leader.

        Args:
            claims: What `claims` has returned on each leader.

        Raises:
            MachineError: Some other process has connected.
        """
        claimed = {bytes(one) for text in claims
                   for one in struct.iter_unpack(f"{_CLAIM_BYTES}B", base64.b64decode(text))}
        deadline = time.monotonic() + _CLOSING
        while strangers := [one for one in _tcp_sockets() if one.own in self.names and one.state == _ESTABLISHED
                            and _claim(one.other, one.own) not in claimed]:
            if time.monotonic() > deadline:
                raise MachineError(explain(
                    "Only ranks of the job may connect to the native engine's port, but another process has", "keep"
                    " other users off the job's hosts, and let nothing between them change addresses (no NAT)",
                    port=strangers[0].own, connected_from=strangers[0].other))
            time.sleep(0.01)


def _free_port() -> int:
    """Finds a port that is free on all interfaces: one of the user's range, or one that the system chooses."""
    first, last = _user_range()
    ports = [0] * _TRIES if last == 0 else random.sample(range(first, last + 1), last + 1 - first)
    for port in ports:
        with contextlib.suppress(OSError), _bound(port) as one:
            return int(one.getsockname()[1])
    raise MachineError(explain("The native engine needs a TCP port that is free on all interfaces", "end what uses"
                               f" them, or set {RANGE} to other ports", **{RANGE: os.environ.get(RANGE)}))


def _user_range() -> tuple[int, int]:
    text = os.environ.get(RANGE, "0")
    if (found := re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)) is not None:
        first, last = int(found[1]), int(found[2] or found[1])
        if first <= last <= 65535:
            return first, last
    raise UsageError(explain(f"{RANGE} must be a range of ports", f"export {RANGE}=40000-40999, or unset it",
                             **{RANGE: text}))


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), _bound(port):
        return True
    return False


@contextlib.contextmanager
def _bound(port: int) -> Iterator[socket.socket]:
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as one:
        if dual:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind(("", port))
        yield one


def _tcp_sockets() -> list[_Socket]:
    """The TCP sockets of this process, found without touching any: another thread may be using or closing them."""
    descriptors: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            state = os.fstat(int(name))
            if stat.S_ISSOCK(state.st_mode):
                descriptors[str(state.st_ino)] = int(name)
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/thread-self/net", table).read_text().splitlines()[1:]:
                _, own, other, state_code, _, _, _, _, _, inode, *_ = line.split()
                if inode in descriptors:
                    found.append(_Socket(descriptors[inode], state_code, _name(own), _name(other)))
    return found


def _name(text: str) -> str:
    """Reads an address of the kernel's tables, such as `0100007F:1F90`: words in this machine's order, and the port."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[start:start + 8], 16)) for start in range(0, len(words), 8))
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"


def _port_of(name: str) -> int:
    return int(name.rpartition(":")[2])


def _claim(maker: str, port: str) -> bytes:
    """Stands for a connection, in few bytes: each rank gets those of all pairs of hosts in one message."""
    return hashlib.blake2b(f"{maker} {port}".encode(), digest_size=_CLAIM_BYTES).digest()


def _admit(one: socket.socket, addresses: Collection[str]) -> None:
    """Lets packets from these addresses pass, or from as small networks around them as there is room for."""
    kind = ipaddress.IPv4Network if one.family == socket.AF_INET else ipaddress.IPv6Network
    version, bits = (4, 32) if kind is ipaddress.IPv4Network else (6, 128)
    sources = [int(address) for address in map(ipaddress.ip_address, addresses) if address.version == version]
    for length in range(bits, -1, -bits // 16):
        networks: Iterable[IPNetwork] = ipaddress.collapse_addresses(  # type: ignore[type-var]
            kind((source, length), strict=False) for source in sources)
        program = _program([_range(network) for network in networks], _SOURCE[version])
        if len(program) > _MOST_INSTRUCTIONS:
            continue
        try:
            _attach(one, program)
            break
        except OSError as error:
            if error.errno != errno.ENOMEM or length == 0:
                raise


def _range(network: IPNetwork) -> Range:
    first, last = (struct.unpack(f"!{len(end.packed) // 4}I", end.packed)
                   for end in (network.network_address, network.broadcast_address))
    words = list(zip(first, last, strict=True))
    while len(words) > 1 and words[-1] == (0, _ALL):
        words.pop()
    return words


def _program(ranges: Sequence[Range], offset: int) -> list[Instruction]:
    """A filter's instructions that admit addresses in one of these ranges, which are in order, and drop all others.

    Accepted connections keep the filter of the port, so each packet takes few steps, however many the ranges are.
    """
    choices = []
    for (first, last), those in groupby(ranges, key=lambda one: one[0]):
        rest = [one[1:] for one in those]
        choices.append((first, last, _program(rest, offset + 4) if rest[0] else []))
    return [(_LOAD, 0, 0, offset), *_search(choices)]


def _search(choices: Sequence[Choice]) -> list[Instruction]:
    if len(choices) <= _MOST_IN_TURN and not any(rest for _, _, rest in choices):
        return _in_turn(choices)
    if len(choices) == 1:
        value, _, rest = choices[0]
        return [(_EQUAL, 1, 0, value), _DROP, *rest]
    middle = len(choices) // 2
    lower, upper = _search(choices[:middle]), _search(choices[middle:])
    return [(_AT_LEAST, 1, 0, choices[middle][0]), (_JUMP, 0, 0, len(upper)), *upper, *lower]


def _in_turn(choices: Sequence[Choice]) -> list[Instruction]:
    instructions: list[Instruction] = []
    end = sum(1 if first == last else 2 for first, last, _ in choices)  # there it drops, and after that it admits
    for first, last, _ in choices:
        if first == last:
            instructions.append((_EQUAL, end - len(instructions), 0, first))
        else:
            instructions += [(_AT_LEAST, 0, 1, first), (_GREATER, 0, end - len(instructions) - 1, last)]
    return [*instructions, _DROP, _ADMIT]


def _attach(one: socket.socket, instructions: Sequence[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    filters = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(explain("The kernel must let the native engine choose which hosts reach its ports",
                                   "start the job as root, raise net.core.optmem_max if there is no memory, or choose"
                                   " another backend, such as tfdist",
                                   user=os.getuid(), error=error.strerror)) from error


def _has_arrivals(listening: socket.socket) -> bool:
    """Whether there are connections that were not accepted yet."""
    (arrivals,) = struct.unpack_from("@I", listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)
    return bool(arrivals)
