"""Who reaches a port that proves nobody's identity: real sockets on the loopback, which has many addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from hvkeras.backends.native import ports
from hvkeras.errors import MachineError

JOB, STRANGER = "127.0.0.2", "127.0.0.3"


def objection() -> str:
    """Why this process may not filter packets, or ""."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        try:
            ports._attach(one, [(ports._RETURN, 0, 0, 0)])
        except MachineError as error:
            return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(objection()), reason=objection() or "-")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ports.Ports, socket.socket]]:
    """A listening socket that was opened after the ports were watched, as UCX's is."""
    monkeypatch.setattr(ports, "_CLOSING", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        watched = ports.Ports()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            yield watched, listening
            watched.close()
        assert reaches(other, STRANGER)  # what was there before is nobody's business


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
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listening:
        watched.admit(["fe80::1", "127.0.0.1", admitted])
        assert reaches(listening, "::1") == passes
        watched.close()


def test_a_connection_that_no_rank_has_is_found(guarded: tuple[ports.Ports, socket.socket]) -> None:
    watched, listening = guarded
    watched.admit([JOB, STRANGER])
    with connected(listening, JOB) as leader:
        own, theirs = (f"{host}:{port}" for host, port in (leader.getsockname(), leader.getpeername()))
        with accepted_from(listening, leader) as accepted:
            assert accepted.getpeername() == leader.getsockname()
            assert [theirs, own] in watched.connections()
            watched.require_known([[[own, theirs]]])
            with connected(listening, STRANGER) as stranger, accepted_from(listening, stranger):
                with pytest.raises(MachineError, match="Only ranks of the job may connect") as raised:
                    watched.require_known([[[own, theirs]]])
                assert f"connected_from='{STRANGER}:{stranger.getsockname()[1]}'" in str(raised.value)
            watched.require_known([[[own, theirs]]])  # it has gone, as the second of two connections of UCX's does
