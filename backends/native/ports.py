"""Access control of UCX's port, because UCX does not authenticate peers.

UCX listens on a port while the leaders of a group's hosts connect, and accepts any connection. Socket filters therefore
drop packets from other machines than the job's hosts, and all packets of new connections once the leaders are
connected. Then the leaders compare their connections over the control channel: each connection to the port must have
been made by a leader. UCX gets a port that hvkeras has chosen, so that its sockets are recognized among all sockets of
the process.
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

RANGE = "UCX_TCP_PORT_RANGE"  # UCX's variable with the ports to choose from
_SO_ATTACH_FILTER = 26
# Offsets in a filter of a TCP socket: of the packet's IP header, and of the source address in it.
_NETWORK_HEADER = 0x100000000 - 0x100000
_SOURCE = {4: _NETWORK_HEADER + 12, 6: _NETWORK_HEADER + 8}
_LOAD, _JUMP, _EQUAL, _GREATER, _AT_LEAST, _RETURN = 0x20, 0x05, 0x15, 0x25, 0x35, 0x06
_ALL = 0xFFFFFFFF
_MOST_INSTRUCTIONS = 4096
_MOST_IN_TURN = 32  # up to this number, addresses are compared linearly; jumps of comparisons reach 255 instructions
_LISTENING, _ESTABLISHED = "0A", "01"
# Seconds for UCX to accept pending connections, and to close one of two connections that a pair of hosts made at once.
_CLOSING = 2.0
_TRIES = 100  # for a port that is free on all interfaces
_CLAIM_BYTES = 6

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Instruction = tuple[int, int, int, int]  # code, steps if true, steps if false, value
# The addresses of a network: the first and the last value of each 32-bit word, without trailing words of any value.
Range = list[tuple[int, int]]
# The first and the last value of a word, and the instructions that compare the following words, if any.
Choice = tuple[int, int, list[Instruction]]
_ADMIT: Instruction = (_RETURN, 0, 0, _ALL)
_DROP: Instruction = (_RETURN, 0, 0, 0)


class _Socket(NamedTuple):
    """A TCP socket of this process; `own` and `other` are its ends, as `address:port`."""

    descriptor: int
    state: str
    own: str
    other: str


class Ports:
    """TCP port of one link, on which UCX listens with a socket for each interface, and the connections to it.

    Attributes:
        number: The port, free on construction, on which UCX must listen.
        names: The listening sockets, as `address:port`; empty before `admit`.

    Raises:
        UsageError: The variable UCX_TCP_PORT_RANGE is not a range of ports.
        MachineError: No port is free.
    """

    def __init__(self) -> None:
        self.number: int = _free_port()
        self.names: list[str] = []
        self._listening: list[socket.socket] = []

    @property
    def is_free(self) -> bool:
        """True if no process has bound the port."""
        return _is_free(self.number)

    def admit(self, addresses: Collection[str]) -> None:
        """Drop packets to UCX's port from all addresses except these.

        If there are more addresses than the kernel's filters can hold, the smallest networks that contain them and
        fit into a filter are admitted instead.

        Raises:
            MachineError: The kernel rejects the filter.
        """
        with _explained():
            for found in _tcp_sockets():
                if found.state == _LISTENING and _port_of(found.own) == self.number:
                    self._listening.append(socket.socket(fileno=os.dup(found.descriptor)))
                    self.names.append(found.own)
            for listener in self._listening:
                _admit(listener, addresses)

    def close(self) -> None:
        """Drop all packets of new connections to the port. Existing connections continue."""
        for listener in self._listening:
            with listener, _explained():  # closes this duplicate; UCX has its own descriptor
                _attach(listener, [_DROP])
                deadline = time.monotonic() + _CLOSING
                while _has_pending(listener) and time.monotonic() < deadline:
                    time.sleep(0.001)
        self._listening = []

    def claims(self, names: Collection[str]) -> str:
        """Return the connections that this process has made to these listening sockets, for `require_claimed` there."""
        return base64.b64encode(b"".join(
            _claim(each.own, each.other) for each in _tcp_sockets() if each.other in names)).decode()

    def require_claimed(self, claims: Sequence[str]) -> None:
        """Check that each connection to the port was made by a leader.

        Args:
            claims: The results of `claims` on all leaders.

        Raises:
            MachineError: Some other process has connected.
        """
        claimed = {bytes(claim) for text in claims
                   for claim in struct.iter_unpack(f"{_CLAIM_BYTES}B", base64.b64decode(text))}
        deadline = time.monotonic() + _CLOSING
        while unclaimed := [each for each in _tcp_sockets() if each.own in self.names and each.state == _ESTABLISHED
                            and _claim(each.other, each.own) not in claimed]:
            if time.monotonic() > deadline:
                raise MachineError(explain(
                    "Only ranks of the job may connect to the native engine's port, but another process has", "exclude"
                    " other users from the job's hosts, and translate no addresses between them (no NAT)",
                    port=unclaimed[0].own, connected_from=unclaimed[0].other))
            time.sleep(0.01)


def _free_port() -> int:
    """Return a port that is free on all interfaces: one of the user's range, or one that the system chooses."""
    first, last = _user_range()
    ports = [0] * _TRIES if last == 0 else random.sample(range(first, last + 1), last + 1 - first)
    for port in ports:
        with contextlib.suppress(OSError), _bound(port) as bound:
            return int(bound.getsockname()[1])
    raise MachineError(explain("The native engine needs a TCP port that is free on all interfaces", "stop the programs"
                               f" that use them, or set {RANGE} to other ports", **{RANGE: os.environ.get(RANGE)}))


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
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as bound:
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
        yield bound


def _tcp_sockets() -> list[_Socket]:
    """Return the TCP sockets of this process, without touching them: other threads may be using or closing them."""
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
    """Parse an address of the kernel's tables, such as `0100007F:1F90`: words in native byte order, and the port."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[start:start + 8], 16)) for start in range(0, len(words), 8))
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"


def _port_of(name: str) -> int:
    return int(name.rpartition(":")[2])


def _claim(maker: str, port: str) -> bytes:
    # A short hash of a connection, because each rank receives the claims of all pairs of hosts in one message.
    return hashlib.blake2b(f"{maker} {port}".encode(), digest_size=_CLAIM_BYTES).digest()


def _admit(listener: socket.socket, addresses: Collection[str]) -> None:
    """Attach a filter that admits these addresses, or the smallest networks around them that fit."""
    kind = ipaddress.IPv4Network if listener.family == socket.AF_INET else ipaddress.IPv6Network
    version, bits = (4, 32) if kind is ipaddress.IPv4Network else (6, 128)
    sources = [int(address) for address in map(ipaddress.ip_address, addresses) if address.version == version]
    for length in range(bits, -1, -bits // 16):
        networks: Iterable[IPNetwork] = ipaddress.collapse_addresses(  # type: ignore[type-var]
            kind((source, length), strict=False) for source in sources)
        program = _program([_range(network) for network in networks], _SOURCE[version])
        if len(program) > _MOST_INSTRUCTIONS:
            continue
        try:
            _attach(listener, program)
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
    """Return the instructions of a filter that admits addresses in these sorted ranges, and drops all others.

    Accepted connections inherit the port's filter, so each packet takes few steps, regardless of the number of ranges.
    """
    choices = []
    for (first, last), group in groupby(ranges, key=lambda words: words[0]):
        rest = [words[1:] for words in group]
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
    end = sum(1 if first == last else 2 for first, last, _ in choices)  # the index of _DROP; _ADMIT follows
    for first, last, _ in choices:
        if first == last:
            instructions.append((_EQUAL, end - len(instructions), 0, first))
        else:
            instructions += [(_AT_LEAST, 0, 1, first), (_GREATER, 0, end - len(instructions) - 1, last)]
    return [*instructions, _DROP, _ADMIT]


def _attach(listener: socket.socket, instructions: Sequence[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    filters = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(explain("The kernel must let the native engine choose which hosts reach its ports",
                                   "start the job as root, raise net.core.optmem_max if there is no memory, or choose"
                                   " another backend, such as tfdist",
                                   user=os.getuid(), error=error.strerror)) from error


def _has_pending(listener: socket.socket) -> bool:
    # For a listening socket, this field of TCP_INFO (tcpi_unacked) is the number of connections to accept.
    (pending,) = struct.unpack_from("@I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 24)
    return bool(pending)
