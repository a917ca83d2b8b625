"""Network of this machine: host name, addresses, routes to other hosts, and reserved ports for gRPC servers."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from hvkeras.errors import UsageError, explain
from hvkeras.host.program import env

LOOPBACK = "127.0.0.1"
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Return a string that identifies this host: its name, its boot ID, and its shared-memory mount.

    Two containers on one machine count as two hosts, even with the same name, because they share no memory. Two
    machines with the name `localhost` differ in their boot ID.
    """
    boot, memory = "", ""
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    with contextlib.suppress(OSError):
        memory = str(os.stat("/dev/shm").st_dev)
    return f"{socket.gethostname()} {boot} {memory}".rstrip()


def sent_bytes() -> int:
    """Return the bytes that this host's network cards have sent, without the loopback."""
    counters = psutil.net_io_counters(pernic=True, nowrap=True)
    return sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")


def own_name_resolves_to() -> str:
    """Return the address that this machine's host name resolves to; "" if it does not resolve."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def is_local(host: str) -> bool:
    """Return whether a host name or address refers to this machine."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address.split("%")[0] for nics in psutil.net_if_addrs().values() for address in nics}
    return any(ipaddress.ip_address(address.split("%")[0]).is_loopback or address in own for address in addresses)


def is_loopback(host: str) -> bool:
    """Return whether a name or address is a loopback one, without a DNS query."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def own_addresses_of(host: str) -> list[str]:
    """Return the addresses of this machine that a host name resolves to, excluding loopback."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    own = own_addresses()
    return [address for address in addresses if address in own and not is_loopback(address)]


def address_towards(host: str) -> str:
    """Return the source address of this machine for packets to `host`, without sending any."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(explain(f"Hosts of the job must be reachable by name ({error})",
                                 "check the host name, or choose with HVKERAS_NETWORK_INTERFACES", host=host)) from None


def outward_address() -> str:
    """Return an address at which other hosts reach this machine: that of its name, else of the default route.

    Raises:
        UsageError: There is neither.
    """
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        if not ipaddress.ip_address(own).is_loopback:
            return own
    return address_towards("192.0.2.1")  # reserved for documentation (RFC 5737); nothing is sent there


def interface_address(names: Sequence[str]) -> str:
    """Return the first IPv4 address of the first interface in `names` that has one.

    Raises:
        UsageError: No interface has one; the message lists the interfaces of this machine.
    """
    interfaces = psutil.net_if_addrs()
    for name in names:
        for address in interfaces.get(name, []):
            if address.family == socket.AF_INET:
                return str(address.address)
    raise UsageError(explain("A network interface of this machine must have the given name and an IPv4 address",
                             "the interfaces here are " + ", ".join(sorted(interfaces)), interfaces=list(names)))


def own_networks() -> list[str]:
    """Return this machine's IPv4 addresses with their networks, as `address/bits`, excluding loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    entries = [entry for name in sorted(up) for entry in psutil.net_if_addrs().get(name, ())]
    found = [ipaddress.ip_interface(f"{entry.address}/{entry.netmask}") for entry in entries
             if entry.family == socket.AF_INET and entry.netmask]
    return [str(entry) for entry in found if not entry.ip.is_loopback]


def own_addresses() -> list[str]:
    """Return all addresses of this machine, in the form of `socket.getpeername`."""
    return sorted({entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries
                   if entry.family in (socket.AF_INET, socket.AF_INET6)})


def shared_address(own: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return an address of this machine in a network that all other hosts share; "" if there is none.

    If another host has the same address, the network is a local bridge on both hosts (such as Docker's), which connects
    no hosts.

    Args:
        own: `own_networks()` of this machine.
        others: `own_networks()` of the other hosts.
    """
    for text in own:
        mine = ipaddress.ip_interface(text)
        theirs = [[ipaddress.ip_interface(entry).ip for entry in entries] for entries in others]
        if all(mine.ip not in entries and any(ip in mine.network for ip in entries) for entries in theirs):
            return str(mine.ip)
    return ""


def interface_of(address: str) -> str:
    """Return the name of the interface with `address`, or "lo"."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo"


def local_peer(connected: Any) -> tuple[int, int] | None:
    """Return the process ID and user ID of the peer of a Unix socket (SO_PEERCRED); None for other sockets.

    Args:
        connected: A connected socket. On the client side, the peer is the process that called `listen`.
    """
    if connected.family != socket.AF_UNIX:
        return None
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


def keep_alive(connected: Any, seconds: float) -> None:
    """Make the kernel close a TCP connection whose peer has not responded for some time, even if nothing is sent.

    A host that loses power or network does not close its connections.

    Args:
        seconds: Timeout, at least 3.
    """
    seconds = min(max(3.0, seconds), 30_000.0)  # range of the options
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, seconds / 2), (socket.TCP_KEEPINTVL, seconds / 6),
                          (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 1000 * seconds)):
        connected.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port`; IPv6 addresses have brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


_REUSE_PORT = "TF_GRPC_REUSE_PORT"


@contextlib.contextmanager
def held_port(host: str) -> Iterator[str]:
    """Reserve a free port for a server that is started within the `with` block.

    A bound socket that never listens reserves the port. It shares the port with the server by SO_REUSEPORT, and no
    other program can use it.

    Yields:
        `host:port`, with brackets around an IPv6 address.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder, env(**{_REUSE_PORT: "true"}):
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = holder.getsockname()[1]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
