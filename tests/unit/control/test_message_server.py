"""A server of messages over real sockets, with a handler that says what it is told: proof, admission and faults."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import socket
import threading
import time

import pytest

from hvkeras.control import message_server, wire
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.handler import Handler, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import Hello, StopQuestion, encode
from hvkeras.errors import MachineError, UsageError

SECRET = b"s" * 32


class Echo(Handler):
    """Sends each message back; admits a number once."""

    def __init__(self):
        self.members = Members()
        self.left = queue.Queue()
        self.received = queue.Queue()
        self.faults = queue.Queue()

    def on_join(self, member):
        return "it is there" if member.number in self.members else ""

    def on_message(self, member, message):
        self.received.put(message)
        if isinstance(message, StopQuestion):
            assert message.fit != "fail"
            member.send(message)

    def on_leave(self, member):
        self.left.put(member.number)

    def on_fault(self, what, error):
        self.faults.put(f"{what}: {type(error).__name__}")


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:
        def make(host="127.0.0.1", **arguments):
            handler = Echo()
            server = MessageServer(handler, SECRET, host, size=2, **arguments)
            stack.callback(server.stop)
            server.start()
            return handler, server.address

        yield make


@contextlib.contextmanager
def connected(address, number=0, secret=SECRET):
    """A peer of a server."""
    with connect(address) as connection:
        yield Connection(connection, secret, Introduction(number, 2, "here"))


def connect(address):
    """A socket that is connected to a server."""
    connection = socket.socket(socket.AF_UNIX if address[0].startswith("\0") else socket.AF_INET)
    connection.settimeout(5.0)
    connection.connect(address[0] if address[0].startswith("\0") else address)
    return connection


def says(peer, text="hello"):
    """Whether a peer hears what it says."""
    peer.send(StopQuestion(text))
    return peer.read() == StopQuestion(text)


def until(condition):
    """Waits until something holds."""
    for _ in range(100):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never holds")


def test_members_are_admitted_heard_and_missed(serve):
    handler, address = serve()
    with connected(address, 7) as peer:
        assert says(peer) and list(handler.members) == [7]
        with connected(address, 8) as other:
            handler.members.broadcast(StopQuestion("all"))
            assert [peer.read(), other.read()] == [StopQuestion("all")] * 2
        assert handler.left.get(timeout=5.0) == 8
    assert handler.left.get(timeout=5.0) == 7 and not handler.members


@pytest.mark.parametrize("host", ["127.0.0.1", f"\0hvkeras-test-{os.getpid()}"], ids=["tcp", "unix"])
def test_the_last_message_of_a_peer_arrives_although_a_write_to_it_fails(serve, host):
    handler, address = serve(host)
    connection, is_gone = connect(address), threading.Event()
    peer = Connection(connection, SECRET, Introduction(0, 2, "here"))
    handler.received.get(timeout=5.0)  # Arrived

    def write_late():
        """In the server's thread, which reads nothing meanwhile: to a peer that has spoken and gone."""
        assert is_gone.wait(5.0)
        for _ in range(3):
            handler.members[0].send(StopQuestion("late"))
            time.sleep(0.05)

    handler.members.serving.call(write_late)
    peer.send(StopQuestion("last"))
    connection.shutdown(socket.SHUT_RD)
    connection.close()
    is_gone.set()
    assert handler.left.get(timeout=5.0) == 0
    assert handler.received.get(timeout=0) == StopQuestion("last")
    assert handler.faults.empty()


def test_a_rejected_peer_learns_why(serve):
    handler, address = serve()
    with connected(address) as peer:
        with pytest.raises(UsageError, match="it is there"), connected(address):
            pass
        assert says(peer)
    assert handler.left.get(timeout=5.0) == 0 and handler.left.empty()


def test_a_fault_is_printed_and_handled_and_the_others_go_on(serve, capsys):
    handler, address = serve()
    with connected(address) as peer:
        peer.send(StopQuestion("fail"))
        assert handler.faults.get(timeout=5.0) == "at a message (StopQuestion) of rank 0 on here: AssertionError"
        assert says(peer)
    assert "a server of hvkeras has failed at a message" in capsys.readouterr().err


def test_calls_from_other_threads_run_in_the_servers_own(serve):
    handler, address = serve()
    server = handler.members.serving
    with connected(address) as peer:
        server.call(handler.members.broadcast, StopQuestion("now"))
        server.call(server.call_later, 0.01, handler.members.broadcast, StopQuestion("later"))
        assert [peer.read(), peer.read()] == [StopQuestion("now"), StopQuestion("later")]
        server.call(lambda: {}["absent"])
        assert handler.faults.get(timeout=5.0) == "in a callback: KeyError"


def test_a_wrong_secret_is_refused_and_says_so(serve):
    with pytest.raises((wire.AuthenticationError, ConnectionError)), connected(serve()[1], secret=b"another"):
        pass


def test_a_stranger_learns_nothing_and_cannot_speak(serve):
    handler, address = serve()
    with socket.create_connection(address, timeout=5.0) as stranger:
        challenge = stranger.recv(100)
        assert challenge.startswith(wire.MAGIC) and SECRET not in challenge
        stranger.sendall(b"\0" * 64 + encode(Hello(0, 2, "here", 1, 0)))
        assert stranger.recv(100) == b""
    assert not handler.members
    with connected(address) as peer:
        assert says(peer)


def test_unauthenticated_clients_are_counted_in_one_line_and_limited(serve, monkeypatch, caplog):
    lines = queue.Queue()
    monkeypatch.setattr(message_server, "MAX_CONCURRENT", 3)
    handler, address = serve(on_note=lines.put)
    server = handler.members.serving
    waiting = [socket.create_connection(address, timeout=5.0) for _ in range(5)]  # the size is 2
    try:
        assert all(each.recv(100) for each in waiting)
        for oldest in waiting[:4]:  # each makes room for a newer one, which may be a rank
            waiting.append(socket.create_connection(address, timeout=5.0))
            assert waiting[-1].recv(100)
            assert oldest.recv(100) == b""
        assert re.fullmatch(r"[1-4] connections? to the control channel did not authenticate with the job's secret,"
                            r" the last one from 127\.0\.0\.1; they were refused", lines.get(timeout=10.0))
    finally:
        for each in waiting:
            each.close()
    for _ in range(50):  # until the server has noticed
        with contextlib.suppress(ConnectionError), connected(address) as peer:
            assert says(peer)
            break
        time.sleep(0.1)
    assert lines.empty()  # the next one comes a minute later
    server._on_loop_error(server._loop, {"message": "accept", "exception": OSError(errno.EMFILE, "full")})
    assert not caplog.records
    assert "10 connections" in server._unauthenticated.report(time.monotonic() + message_server.REPORT_EVERY)


def test_strangers_cannot_keep_members_out(serve, monkeypatch):
    monkeypatch.setattr(message_server, "MAX_CONCURRENT", 3)
    _, address = serve()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(address, timeout=5.0))
        peers = [stack.enter_context(connected(address, number)) for number in (0, 1)]
        assert all(says(peer) for peer in peers)


def test_frames_cannot_be_changed_replayed_or_reordered():
    key = b"k" * 32
    sender, receiver = wire.Seal(key, b"client", b"server"), wire.Seal(key, b"server", b"client")

    def parts(frame):
        head = wire.HEADER.size
        return frame[:head], frame[head : head + wire.CODE_BYTES], frame[head + wire.CODE_BYTES :]

    first, second = (parts(b"".join(sender.close_frames(text))) for text in (b"n1", b"n2"))
    with pytest.raises(wire.AuthenticationError):
        receiver.open_frame(*second)
    with pytest.raises(wire.AuthenticationError):
        receiver.open_frame(*first[:2], first[2].replace(b"1", b"3"))
    with pytest.raises(wire.AuthenticationError):  # as if more followed
        receiver.open_frame(b"\1" + first[0][1:], *first[1:])
    assert receiver.open_frame(*first) == b"n1"
    with pytest.raises(wire.AuthenticationError):
        receiver.open_frame(*first)
    with pytest.raises(wire.AuthenticationError):  # our own frames do not pass as the peer's
        sender.open_frame(*second)


@pytest.mark.parametrize("sealed", [True, False])
def test_large_messages_arrive_whole_and_the_last_one_before_the_end(serve, sealed):
    host = "127.0.0.1" if sealed else f"\0hvkeras-test-{os.getpid()}"
    handler, address = serve(host)
    with socket.socket(socket.AF_INET if sealed else socket.AF_UNIX) as connected:
        connected.settimeout(10.0)
        connected.connect(address if sealed else host)
        client = Connection(connected, SECRET, Introduction(0, 2, "here"))
        assert bool(client._seal._key) == sealed
        texts = ["a" * 9_000_000, "b", "c" * 100_000]  # three frames, one with its header, one in pieces
        for text in texts:
            client.send(StopQuestion(text))
        assert [client.read().fit for _ in texts] == texts
        handler.members.serving.call(lambda: (handler.members.broadcast(StopQuestion(texts[0])),
                                              handler.members[0].close()))
        time.sleep(0.2)
        assert client.read().fit == texts[0]
        with pytest.raises(ConnectionError):
            client.read()


def test_an_absurd_length_is_refused():
    with pytest.raises(wire.AuthenticationError, match="must be under"):
        wire.payload_length(b"\xff" * wire.HEADER.size)


def test_a_taken_port_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(MachineError, match="must be able to listen"):
            MessageServer(Echo(), SECRET, "127.0.0.1", taken.getsockname()[1])


@contextlib.contextmanager
def giving_up(address, attempt, host="here"):
    """A connection that sends its hello when what it yields is called; it is given up before the answer is read."""
    with socket.create_connection(address, timeout=5.0) as connection:
        seal = wire.authenticate_to_server(connection, SECRET)
        hello = encode(Hello(0, 2, host, os.getpid(), attempt))
        yield lambda: connection.sendall(b"".join(seal.close_frames(hello)))


@pytest.mark.parametrize("order", ["ended first", "still open", "hello comes late"])
def test_a_peer_may_come_again_when_the_server_stood_still(serve, order):
    handler, address = serve()
    with contextlib.ExitStack() as stack:
        first_hello = stack.enter_context(giving_up(address, -1))
        if order != "hello comes late":
            first_hello()
            until(lambda: 0 in handler.members)
        if order == "ended first":
            stack.close()
            assert handler.left.get(timeout=5.0) == 0
        with connected(address) as second:
            if order == "hello comes late":
                first_hello()
            stack.close()
            assert says(second)
            if order == "still open":
                assert handler.left.get(timeout=5.0) == 0
            assert handler.left.empty()


def test_another_process_cannot_take_the_place_of_a_peer_that_comes_again(serve):
    handler, address = serve()
    with giving_up(address, -1, host="elsewhere") as hello:
        hello()
        until(lambda: 0 in handler.members)
        with pytest.raises(UsageError, match="it is there"), connected(address):
            pass


def test_a_message_that_does_not_exist_ends_its_connection_alone(serve, capsys):
    handler, address = serve()
    with connected(address) as peer, connected(address, 1) as other:
        peer._socket.sendall(b"".join(peer._seal.close_frames(b'["Unknown",{}]')))
        assert "ValueError" in handler.faults.get(timeout=5.0)
        assert handler.left.get(timeout=5.0) == 0
        assert says(other)
    assert "not a message of hvkeras: Unknown" in capsys.readouterr().err
