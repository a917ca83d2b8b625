"""Every socket on which hvkeras listens is in the table of docs/security/sockets.md, and holds against strangers."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from hvkeras.bench.channel import Channel, ChannelClosedError, Listener
from hvkeras.control import wire
from hvkeras.control.launch_environments import Launch
from hvkeras.control.membership_channel import MembershipServer
from hvkeras.control.message_server import MessageServer
from hvkeras.control.relay import RelayHandler, connect_to_relay, relay_name
from hvkeras.control.rendezvous import claim_port
from hvkeras.control.server import ControlServer
from hvkeras.control.wire import accept_authenticated
from hvkeras.diagnostics.doctor.hosts import CallServer
from hvkeras.errors import PeerError
from hvkeras.host.network import LOOPBACK
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.parameter_server.cluster_membership import ClusterMembership
from hvkeras.settings import Settings
from hvkeras.spark.output import OutputServer

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs" / "security" / "sockets.md"
SECRET = b"s" * 32
ENDLESS = 64 * 1024 * 1024  # bytes: more than any socket may take from a stranger
_LISTENING = {"listen", "create_server", "start_server", "start_unix_server", "create_datagram_endpoint"}
_NOT_SOCKETS = {"_preemption"}  # whose `listen` is about signals
_SERVER, _SERVER_FILE = "MessageServer", "control/message_server.py"
Address = tuple[str, int]


def sources() -> dict[str, ast.Module]:
    """The syntax of each file, by its path as the tables name it."""
    files = [*(ROOT / "hvkeras").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    # A checkout may have the link hvkeras/backends.
    return {str(path.relative_to(ROOT)).removeprefix("hvkeras/"): ast.parse(path.read_text()) for path in files
            if ROOT / "hvkeras" / "backends" not in path.parents}


def listening_files() -> set[str]:
    """The files that open a listening socket, or make a server that does."""
    found: set[str] = set()
    for name, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LISTENING:
                receiver = node.func.value
                if not (isinstance(receiver, ast.Attribute) and receiver.attr in _NOT_SOCKETS):
                    found.add(name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SERVER:
                found.add(name)
            if isinstance(node, ast.ClassDef):
                bases = {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}
                assert _SERVER not in bases, f"{name}: a server takes a handler"
                if any(base.endswith(("HTTPServer", "TCPServer", "UDPServer")) for base in bases):
                    found.add(name)
    return found - {_SERVER_FILE}


def test_the_tables_list_every_listening_socket():
    listed = set(re.findall(r"`([\w/]+\.py)`", TABLES.read_text()))
    assert listed == listening_files()
    not_here = {"diagnostics/doctor/machine.py", "backends/horovod/gloo.py"}  # accepts nothing; tests/unit/backends
    assert listed - not_here == {*OPEN, "bench/channel.py", "launcher/fork_server.py"}  # these in private folders


@contextlib.contextmanager
def serving(server: Any) -> Iterator[Address]:
    server.start()
    try:
        yield server.address
    finally:
        server.stop()


@contextlib.contextmanager
def claim() -> Iterator[Address]:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    with claim_port(Launch("TF_CONFIG", cluster=(f"{LOOPBACK}:{port}",))) as claimed:
        yield claimed.getsockname()


@contextlib.contextmanager
def relay() -> Iterator[Address]:
    handler = RelayHandler(15.0)
    server = MessageServer(handler, SECRET, relay_name(("here", 1), SECRET))
    server.start()
    try:
        yield server.address
    finally:
        server.stop()


def connect(address: Address) -> socket.socket:
    host = address[0]
    return connect_to_relay(host, 1.0) if host.startswith("\0") else socket.create_connection(address, timeout=1.0)


@contextlib.contextmanager
def stream() -> Iterator[Address]:
    with socket.create_server((LOOPBACK, 0)) as server:
        accepted: list[object] = []

        def accept() -> None:
            try:
                accepted.append(accept_authenticated(server, SECRET, 1.5))
            except PeerError as error:
                accepted.append(error)

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield server.getsockname()
        accepting.join()
        assert isinstance(accepted[0], PeerError)


OPEN: dict[str, Callable[[], contextlib.AbstractContextManager[Address]]] = {
    "control/server.py": lambda: serving(ControlServer(2, SECRET)),
    "control/relay.py": relay,
    "control/membership_channel.py": lambda: serving(
        MembershipServer(SECRET, LOOPBACK, lambda worker, message: None, 15.0)),
    "control/rendezvous.py": claim,
    "launcher/reporting_hosts.py": lambda: serving(ReportingHosts(SECRET.decode(), LOOPBACK)),
    "spark/output.py": lambda: serving(OutputServer(2, SECRET, LOOPBACK, Printer(2, BytesIO(), BytesIO())).server),
    "parameter_server/cluster_membership.py": lambda: serving(ClusterMembership(
        Launch("TF_CONFIG", size=2), Settings(), SECRET, LOOPBACK, 0, lambda cause: None)),
    "diagnostics/doctor/hosts.py": lambda: serving(CallServer(LOOPBACK).server),
    "bench/streams.py": stream,
}


@pytest.mark.parametrize("where", OPEN)
def test_a_stranger_gets_a_challenge_and_nothing_else(where):
    with OPEN[where]() as address, connect(address) as stranger:
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            stranger.sendall(b"\0" * (wire.NONCE_BYTES + wire.CODE_BYTES))
            while part := stranger.recv(1000):
                got += part
        assert len(got) in (0, len(wire.MAGIC) + wire.NONCE_BYTES)


@pytest.mark.parametrize("where", OPEN)
def test_endless_input_of_a_stranger_is_cut_off(where):
    with OPEN[where]() as address, connect(address) as stranger:
        sent = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < ENDLESS:
                sent += stranger.send(b"\0" * 65536)
        assert sent < ENDLESS


def test_a_benchmark_takes_no_endless_message(tmp_path):
    listener = Listener(tmp_path)
    peer = Channel.to(tmp_path)
    accepted = listener.accept(5.0)
    assert accepted is not None

    def send() -> None:
        with contextlib.suppress(OSError):
            for _ in range(ENDLESS // 65536):
                peer._connection.sendall(b"x" * 65536)

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(ChannelClosedError, match="must be under"):
        accepted.receive(5.0)
    for end in (accepted, peer, listener):
        end.close()
    sending.join()
