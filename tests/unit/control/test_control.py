"""The control channel over real sockets: proof, agreement, failures and liveness."""

from __future__ import annotations

import contextlib
import http.server
import os
import queue
import re
import socket
import tempfile
import threading
import time

import pytest

from hvkeras.control import wire
from hvkeras.control.announcements import announcement_path
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.client import ControlClient
from hvkeras.control.connection import Introduction
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.control.messages import AllJoined, Deadlines
from hvkeras.control.rendezvous import Waiting, ask_store
from hvkeras.control.server import ControlServer
from hvkeras.errors import MachineError, PeerError, UsageError
from hvkeras.settings import Settings

SECRET = b"s" * 32


class Channel:
    """A server and its clients, closed at the end of the test."""

    def __init__(self, size, **deadlines):
        self.ends = queue.Queue()
        self.server = ControlServer(size, SECRET, deadlines=Deadlines(**deadlines), on_end=self.ends.put)
        self.server.start()
        self.waits = self.server._handler._coordinator.waits
        self.clients = []

    def join(self, rank, size=2, secret=SECRET, on_end=lambda cause: None):
        connection = socket.create_connection(self.server.address, timeout=5.0)
        try:
            client = ControlClient(connection, secret, Introduction(rank, size, f"host{rank}"), 5.0, on_end)
        except BaseException:
            connection.close()
            raise
        self.clients.append(client)
        return client

    def close(self):
        for client in self.clients:
            client.leave()
        for client in self.clients:
            client.close()
        self.server.stop()


@pytest.fixture
def channel():
    made = []

    def make(size=2, **deadlines):
        made.append(Channel(size, **deadlines))
        return made[-1]

    yield make
    for one in made:
        one.close()


def together(*calls):
    """Runs calls at the same time and returns their results in order."""
    results = [None] * len(calls)

    def run(index):
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return results


def test_gather_gives_every_rank_all_values_in_rank_order(channel):
    pair = channel()
    clients = [pair.join(1), pair.join(0)]
    values = together(*(lambda c=c: c.gather("k", {"me": c.introduction.rank}, 5.0) for c in clients))
    assert values == [[{"me": 0}, {"me": 1}]] * 2
    assert together(*(lambda c=c: c.gather("k", 7, 5.0) for c in clients)) == [[7, 7]] * 2


LARGE = "x" * (wire.MAX_PAYLOAD // 2)


def test_values_of_all_ranks_may_be_larger_together_than_a_frame(channel):
    trio = channel(3)
    clients = [trio.join(rank, 3) for rank in range(3)]
    values = together(*(lambda c=c: c.gather("k", [c.introduction.rank, LARGE], 20.0) for c in clients))
    assert values == [[[rank, LARGE] for rank in range(3)]] * 3
    assert together(*(lambda c=c: c.gather("k", 7, 5.0) for c in clients)) == [[7] * 3] * 3


def test_a_value_that_is_too_large_is_refused_where_it_is_made(channel):
    pair = channel()
    clients = [pair.join(rank) for rank in range(2)]
    with pytest.raises(UsageError, match=r"A value that ranks exchange must take .* Received: key='k', bytes=\d+"):
        clients[0].gather("k", "x" * wire.MAX_PAYLOAD, 5.0)
    assert together(*(lambda c=c: c.gather("k", 7, 5.0) for c in clients)) == [[7, 7]] * 2


def test_heartbeats_may_describe_any_number_of_tensors(channel):
    pair = channel()
    first, second = pair.join(0), pair.join(1)
    names = [f"layer_{number}/{'part/' * 20}kernel" for number in range(40_000)]
    counts = {f"plan {number}": (number, Described(names[:2] if number else names)) for number in range(20_000)}
    first.join(Counts(counts))
    assert together(lambda: first.gather("k", 1, 20.0), lambda: second.gather("k", 1, 20.0)) == [[1, 1]] * 2
    until(lambda: len(pair.waits.plans_of(0)) == len(counts))
    assert pair.waits.plan("plan 0")["names"] == names
    assert pair.server.cause is None


def test_a_fault_of_the_server_or_of_a_client_ends_the_job_under_its_own_name(channel, monkeypatch):
    for fails in ("server", "client", "heartbeat", "watch"):
        pair = channel()
        first, _ = pair.join(0), pair.join(1)
        if fails == "server":
            monkeypatch.setattr(pair.waits, "enter_exchange", lambda *_: {}["absent"])
            with pytest.raises(PeerError, match=r"channel's server failed .*\(Value\) of rank 0.* KeyError: 'absent'"):
                first.gather("k", 1, 5.0)
        if fails == "client":
            monkeypatch.setattr(first, "on_participation", lambda message: int("x"))
            pair.server._server.call(pair.server._handler.members.broadcast, AllJoined(0))
        if fails == "heartbeat":
            monkeypatch.setattr(first._heartbeats, "watch", 7)
        if fails == "watch":
            monkeypatch.setattr(pair.waits, "check", lambda *_: int("x"))
        cause = pair.ends.get(timeout=5.0)
        assert cause.kind is CauseKind.EXCEPTION and cause.traceback, cause
        assert re.search("KeyError|ValueError|AttributeError", cause.error), cause
        monkeypatch.undo()


class Described:
    """What a plan of these tensors tells about itself."""

    def __init__(self, names):
        self._names = names

    def describe(self):
        return {"label": "gradients", "operation": "allreduce", "how": "", "hint": "", "is_of_model": False,
                "ranks": [0, 1], "names": self._names, "kinds": ["float32[1]"] * len(self._names)}


class Counts:
    """Counts of entered plans, as a heartbeat reads them."""

    def __init__(self, counts):
        self._counts = counts

    def snapshot(self):
        return self._counts

    def site(self, key):
        return "train.py:1 in train"


def test_gather_names_the_missing_rank(channel):
    pair = channel()
    client = pair.join(0)
    missing = []
    with pytest.raises(PeerError, match=r"All 2 ranks must arrive .* rank 1 did not"):
        client.gather("k", 1, 2.5, on_missing=lambda ranks, waited: missing.append(ranks))
    assert [1] in missing


def test_a_rank_that_fails_does_not_say_that_it_makes_progress(channel, capsys, monkeypatch):
    client = channel().join(0)
    client.watch_progress(1.0)
    client._report_move(2.0)
    assert "making progress again, after 2 s" in capsys.readouterr().err
    monkeypatch.setattr(client._connection, "send", lambda message: None)  # the server has not heard of it yet
    client.fail(Cause(CauseKind.EXCEPTION, 0, "host0", 1, "failed"))
    client._report_move(2.0)
    assert client.cause is None and not capsys.readouterr().err
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_the_folder_of_the_secret_is_no_link_of_somebody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "private").mkdir(mode=0o700)
    link = tmp_path / f"hvkeras-{os.getuid()}"
    link.symlink_to(tmp_path / "private")
    launch = Launch("Slurm", size=2, local_size=2, rendezvous=Rendezvous("folder", job="7"))
    assert announcement_path(launch, Settings()) == link / "7.json"
    os.lchown(link, 1234, 1234)
    with pytest.raises(MachineError, match="it is a symbolic link of user 1234, who may change where it leads"):
        announcement_path(launch, Settings())


def test_many_ranks_look_rarely_at_what_they_share():
    def count_looks(waiting):
        looks = 0
        with contextlib.suppress(PeerError):
            while True:
                waiting.check("rank 0", "not there")
                looks += 1
                waiting.pause()
        return looks

    assert count_looks(Waiting(1.1, size=1000)) <= 3
    waited = Waiting(21.0)
    waited._start -= 20.0
    assert count_looks(waited) <= 2


def test_an_answer_of_horovodruns_store_has_an_end():
    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 65536)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Endless) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            with pytest.raises(PeerError, match="its answer is longer than 65536 bytes"):
                ask_store("GET", "http://{}:{}/hvkeras/control".format(*server.server_address), None, Waiting(0.2))
        finally:
            server.shutdown()
            serving.join()


def test_nobody_can_join_once_all_ranks_are_there(channel):
    pair = channel()
    clients = [pair.join(0), pair.join(1)]
    together(*(lambda c=c: c.gather("k", 1, 5.0) for c in clients))
    with pytest.raises(ConnectionRefusedError):  # at once, since an engine may need the port
        socket.create_connection(pair.server.address, timeout=5.0).close()


def until(condition):
    """Waits until something holds."""
    for _ in range(100):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never holds")


def test_a_failure_reaches_every_rank_with_its_cause(channel):
    pair = channel()
    heard = queue.Queue()
    clients = [pair.join(0, on_end=heard.put), pair.join(1, on_end=heard.put)]
    cause = Cause(CauseKind.EXCEPTION, 1, "host1", 42, "failed with ValueError: boom", "Traceback ...")
    clients[1].fail(cause)
    assert [heard.get(timeout=5.0), heard.get(timeout=5.0), pair.ends.get(timeout=5.0)] == [cause] * 3
    assert cause.sentence() == "rank 1 on host1 (pid 42) failed with ValueError: boom"


def test_a_cause_may_be_of_any_length(channel):
    pair = channel()
    clients = [pair.join(0), pair.join(1)]
    clients[0].fail(Cause(CauseKind.EXCEPTION, 0, "host0", 1, "x" * 1_000_000, "y" * 1_000_000 + "the end"))
    cause = clients[1].wait_for_cause(5.0)
    assert len(cause.error) < 20_000 and len(cause.traceback) < 100_000 and cause.traceback.endswith("the end")


def test_ranks_that_another_has_waited_for_too_long_say_where_they_are(channel, capfd):
    trio = channel(3, stall_shutdown=4.0)
    clients = [trio.join(rank, size=3) for rank in range(3)]
    clients[0].fail(Cause(CauseKind.TIMEOUT, 0, "host0", 1, "failed with DeadlineExceededError"), secondary=True)
    cause = trio.ends.get(timeout=10.0)  # the main thread of all three, and in no call of TensorFlow's
    assert (cause.kind, cause.rank) == (CauseKind.STALLED, None)
    assert cause.error.startswith("ranks have not entered a collective in which rank 0 has waited longer than"
                                  " HVKERAS_STALL_SHUTDOWN allows (4 s): rank 1 at ")
    assert ", rank 2 at " in cause.error and "rank 0 at" not in cause.error
    assert "rank 1 on host1" in capfd.readouterr().err


def test_a_lost_connection_is_a_failure_unless_the_rank_said_goodbye(channel):
    trio = channel(3)
    clients = [trio.join(rank, size=3) for rank in range(3)]
    clients[1].leave()
    clients[1].close()
    with pytest.raises(queue.Empty):
        trio.ends.get(timeout=0.5)
    clients[2]._connection.closed.set()
    clients[2]._connection._socket.shutdown(socket.SHUT_RDWR)  # as the kernel does for a killed process
    cause = trio.ends.get(timeout=5.0)
    assert (cause.kind, cause.rank, cause.host) == (CauseKind.LOST, 2, "host2")


def test_a_silent_rank_is_lost_after_the_liveness_deadline(channel):
    pair = channel(liveness=1.0)
    clients = [pair.join(0), pair.join(1)]
    clients[1]._heartbeats._send = lambda message: None  # its process is stopped
    cause = pair.ends.get(timeout=10.0)
    assert (cause.kind, cause.rank) == (CauseKind.SILENT, 1) and "no sign of life for 1 s" in cause.error


def test_a_server_that_ends_in_good_order_takes_nobody_with_it(channel):
    pair = channel()
    heard = queue.Queue()
    client = pair.join(1, on_end=heard.put)
    pair.server.stop()
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.5)
    assert client.detached


