"""Who reaches a port that proves nobody's identity: real sockets on the loopback, which has many addresses."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import random
import socket
import struct
from collections.abc import Iterator

import pytest

from hvkeras.backends.native import ports
from hvkeras.errors import MachineError, UsageError

JOB, STRANGER = "127.0.0.2", "127.0.0.3"


def objection() -> str:
    """Why this process may not filter packets, or ""."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        try:
            ports._attach(one, [ports._DROP])
        except OSError as error:
            return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(objection()), reason=objection() or "-")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_CLOSING", 0.3)


@pytest.fixture
def guarded() -> Iterator[tuple[ports.Ports, socket.socket]]:
    """A socket that listens on the given port, as UCX's does, and one that another thread opens meanwhile."""
    watched = ports.Ports()
    with socket.create_server(("127.0.0.1", watched.number)) as listening, socket.create_server(
            ("127.0.0.1", 0)) as other:
        yield watched, listening
        watched.close()
        assert reaches(other, STRANGER)  # what is not UCX's is nobody's business


def reaches(listening: socket.socket, source: str) -> bool:
    """Whether a connection from an address comes about; the other end is closed with it."""
    with contextlib.suppress(TimeoutError), connected(listening, source):
        return True
    return False


def connected(listening: socket.socket, source: str) -> socket.socket:
    return socket.create_connection(listening.getsockname()[:2], timeout=0.3, source_address=(source, 0))


def test_only_hosts_of_the_job_reach_the_port_and_later_nobody(guarded: tuple[ports.Ports, socket.socket]) -> None:
    watched, listening = guarded
    assert reaches(listening, STRANGER)
    watched.admit(["::1", "10.1.2.3", JOB])
    assert reaches(listening, JOB)
    assert not reaches(listening, STRANGER)
    with connected(listening, JOB) as early, accepted_from(listening, early) as accepted:
        watched.close()
        assert not reaches(listening, JOB)
        early.sendall(b"goes on")
        assert accepted.recv(10) == b"goes on"


def accepted_from(listening: socket.socket, other: socket.socket) -> socket.socket:
    """The other end of a connection; those that came before it are closed."""
    while True:
        accepted, _ = listening.accept()
        if accepted.getpeername() == other.getsockname():
            return accepted
        accepted.close()


@pytest.mark.parametrize(("admitted", "passes"), [("::2", False), ("::1", True)])
def test_the_same_over_ipv6(admitted: str, passes: bool) -> None:
    watched = ports.Ports()
    with listening_on_ipv6(watched) as listening:
        watched.admit(["fe80::1", "127.0.0.1", admitted])
        assert reaches(listening, "::1") == passes
        watched.close()


def listening_on_ipv6(watched: ports.Ports) -> socket.socket:
    try:
        return socket.create_server(("::1", watched.number), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


# Each a host's, in networks of their own; with IPv6, in one network, where a card's number is the rest.
MANY = {4: [f"{10 + i % 90}.{i // 90}.{i * 37 % 251}.{1 + i * 91 % 251}" for i in range(300)],
        6: [f"2001:db8:0:1:{i * 40503 % 65521:x}:{i * 30011 % 65519:x}:{i * 60013 % 65497:x}:{i:x}"
            for i in range(1, 301)]}


def test_addresses_of_many_hosts_are_admitted_and_a_neighbours_is_not(
        guarded: tuple[ports.Ports, socket.socket]) -> None:
    watched, listening = guarded
    own = [f"127.{i % 256}.{i * 37 % 251}.{1 + i * 91 % 251}" for i in range(300)]
    watched.admit([*own, *MANY[6]])
    for address in own[::75]:
        assert reaches(listening, address)
        neighbour = f"{address.rpartition('.')[0]}.{int(address.rpartition('.')[2]) ^ 2}"
        assert neighbour in own or not reaches(listening, neighbour)


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 6])
def test_of_too_many_addresses_the_networks_around_them_are_admitted(version: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_INSTRUCTIONS", 200)
    watched = ports.Ports()
    with listening_on_ipv6(watched) if version == 6 else socket.create_server(
            ("127.0.0.1", watched.number)) as listening:
        own = listening.getsockname()[0]
        watched.admit(MANY[version])
        assert not reaches(listening, own)
        watched.admit([*MANY[version], own])
        assert reaches(listening, own)
        watched.close()


def admits(program: list[ports.Instruction], address: str) -> bool:
    """What the kernel makes of a filter for a packet from an address."""
    packed = ipaddress.ip_address(address).packed
    index, loaded = 0, 0
    for _ in range(200):  # steps, which are few
        code, if_true, if_false, value = program[index]
        index += 1
        if code == ports._RETURN:
            return bool(value)
        if code == ports._LOAD:
            (loaded,) = struct.unpack_from("!I", packed, value)
        elif code == ports._JUMP:
            index += value
        else:
            holds = {ports._EQUAL: loaded == value, ports._GREATER: loaded > value, ports._AT_LEAST: loaded >= value}
            index += if_true if holds[code] else if_false
    raise AssertionError("too many steps")


@pytest.mark.parametrize(("version", "length"), [(4, 24), (4, 32), (6, 32), (6, 60), (6, 128)])
def test_a_filter_admits_exactly_its_networks(version: int, length: int) -> None:
    chosen = random.Random(length)
    kind, bits = (ipaddress.IPv4Network, 32) if version == 4 else (ipaddress.IPv6Network, 128)
    networks = list(ipaddress.collapse_addresses([
        *(kind((chosen.getrandbits(bits), min(bits, length + chosen.randrange(3))), strict=False) for _ in range(70)),
        *(kind((int(ipaddress.ip_address(MANY[version][0])) + i, bits)) for i in range(7))]))
    program = ports._program([ports._range(network) for network in networks], 0)
    for network in networks[::5]:
        first, last = int(network.network_address), int(network.broadcast_address)
        middle = chosen.randint(first, last)
        for number in {first - 1, first, middle, last, last + 1, *(middle ^ 1 << bit for bit in range(0, bits, 3))}:
            if 0 <= number < 1 << bits:
                address = kind((number, bits)).network_address
                assert admits(program, str(address)) == any(address in one for one in networks), (address, network)


def test_a_kernel_that_takes_no_filter_is_an_error_that_says_so(guarded: tuple[ports.Ports, socket.socket],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = guarded
    with monkeypatch.context() as changed:
        changed.setattr(ports, "_MOST_INSTRUCTIONS", 10**9)
        changed.setattr(ports, "_program", lambda ranges, offset: [ports._DROP] * 5000)
        with pytest.raises(MachineError, match=r"The kernel must let the native engine choose .*Invalid argument"):
            watched.admit([JOB])


def test_the_port_is_one_of_the_users_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports._bound(0) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setenv(ports.RANGE, f"{number}-{number}")
        with pytest.raises(MachineError, match="needs a TCP port that is free"):
            ports.Ports()
        monkeypatch.setenv(ports.RANGE, f"{number - 1}-{number}")
        if ports._is_free(number - 1):
            assert ports.Ports().number == number - 1
    for wrong in ("x", "", "7-", "-7", "9-7", "1-70000"):
        monkeypatch.setenv(ports.RANGE, wrong)
        with pytest.raises(UsageError, match="UCX_TCP_PORT_RANGE must be a range"):
            ports.Ports()


def test_a_connection_that_no_rank_has_is_found(guarded: tuple[ports.Ports, socket.socket]) -> None:
    watched, listening = guarded
    watched.admit([JOB, STRANGER])
    with connected(listening, JOB) as leader:
        claims = watched.claims(watched.names)
        own, theirs = leader.getsockname(), leader.getpeername()
        assert base64.b64decode(claims) == ports._claim(f"{own[0]}:{own[1]}", f"{theirs[0]}:{theirs[1]}")
        with accepted_from(listening, leader) as accepted:
            assert accepted.getpeername() == leader.getsockname()
            watched.require_claimed(["", claims])
            with connected(listening, STRANGER) as stranger, accepted_from(listening, stranger):
                with pytest.raises(MachineError, match="Only ranks of the job may connect") as raised:
                    watched.require_claimed([claims])
                assert f"connected_from='{STRANGER}:{stranger.getsockname()[1]}'" in str(raised.value)
            watched.require_claimed([claims])  # it has gone, as the second of two connections of UCX's does
