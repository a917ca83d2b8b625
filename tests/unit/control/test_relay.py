"""Relays over real sockets, each a process of its own: what ranks send and receive, and who is named when it fails."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time

import pytest

from hvkeras.control.client import ControlClient
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.control.messages import Deadlines, Heartbeat
from hvkeras.control.relay import connect_to_relay, relay_lock, relay_name, start_relay
from hvkeras.control.relayed_ranks import Batch, as_runs, from_runs
from hvkeras.control.rendezvous import Waiting, _connect_client
from hvkeras.control.server import ControlServer
from hvkeras.errors import UsageError
from hvkeras.settings import Settings

SECRET = b"s" * 32
HOSTS = ("127.0.0.1", "127.0.0.2")  # addresses of the server, so that each stands for a host with a relay of its own
LIVENESS = 3.0


class Job:
    """A server, and the clients of ranks on two hosts, of two ranks each."""

    def __init__(self, size=4):
        self.size, self.ends = size, queue.Queue()
        self.server = ControlServer(size, SECRET, "0.0.0.0", deadlines=Deadlines(liveness=LIVENESS),
                                    on_end=self.ends.put)
        self.server.start()
        self.clients = {}
        self.told = {}

    def connect(self, rank, claimed=None, host=None):
        address = (HOSTS[rank // 2 if host is None else host], self.server.address[1])
        settings = Settings({"HVKERAS_RELAY_FROM": "2", "HVKERAS_LIVENESS_TIMEOUT": str(LIVENESS)})
        launch = Launch("here", rank if claimed is None else claimed, self.size, Rendezvous("run", f"{address[0]}:1"),
                        None, 2)
        client = _connect_client(launch, settings, lambda cause: self.told.setdefault(rank, cause), Waiting(20.0),
                                 address, SECRET, None)
        client.server_is_rank = False
        self.clients[rank] = client
        return client

    def connect_all(self):
        at_once(self.connect, range(self.size))
        return self

    def gather(self, key, values):
        return at_once(lambda rank: self.clients[rank].gather(key, values[rank], 20.0), range(self.size))

    def relay_of(self, rank):
        return self.clients[rank]._relay

    def sentences(self, ranks):
        until(lambda: all(rank in self.told for rank in ranks))
        return [self.told[rank].sentence() for rank in ranks]

    def close(self):
        relays = {client._relay for client in self.clients.values()}
        for client in self.clients.values():
            client.leave()
        for client in self.clients.values():
            client.close()
        self.server.stop()
        for pid in relays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: not any(alive(pid) for pid in relays))


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


def at_once(function, arguments):
    """Calls a function with each argument, at the same time; returns the results in order."""
    results = {}
    threads = [threading.Thread(target=lambda one=one: results.update({one: function(one)})) for one in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return [results[one] for one in arguments]


def alive(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition):
    """Waits until something holds."""
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never holds")


def test_ranks_of_a_host_share_one_connection_and_get_all_values(job):
    job.connect_all()
    assert len({job.relay_of(rank) for rank in range(4)}) == 2 and job.relay_of(0) == job.relay_of(1)
    assert len(job.server._handler.members) == 2 and job.server.connected == {0, 1, 2, 3}
    for key, values in (("small", [1, 2, 3, 4]), ("equal", ["x" * 5000] * 4),
                        ("large", ["abcd"[r] * 3000 for r in range(4)]),
                        ("facts", [{"host": f"node{r // 2}", "rank": r, "text": "y" * 1000} for r in range(4)]),
                        ("large", [[r] * 2000 for r in range(4)])):
        assert job.gather(key, values) == [values] * 4
    assert all(client.local_address.startswith("127.") for client in job.clients.values())
    job.server._server.call(job.server._handler.ranks.broadcast, Heartbeat())
    assert job.server.cause is None


def test_a_rank_that_is_lost_is_named_on_all_hosts(job):
    job.connect_all()
    job.clients[1]._connection._socket.shutdown(socket.SHUT_RDWR)
    found = job.sentences([0, 2, 3])
    assert all(text.startswith("rank 1 on ") and "ended unexpectedly" in text for text in found), found


def test_a_rank_that_leaves_ends_nothing(job):
    job.connect_all()
    job.clients[3].leave()
    job.clients.pop(3).close()
    time.sleep(0.5)
    assert job.server.cause is None and job.server.connected == {0, 1, 2}


@pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, "ended unexpectedly"),
                                              (signal.SIGSTOP, f"gave no sign of life for {LIVENESS:g} s")])
def test_a_relay_that_fails_is_named_with_its_ranks(job, number, what):
    job.connect_all()
    pid = job.relay_of(2)
    os.kill(pid, number)
    here = socket.gethostname()
    assert job.sentences([0, 1]) == [job.ends.get(timeout=1.0).sentence()] * 2
    assert job.told[0].sentence().startswith(f"the relay on {here} (pid {pid}), which connects ranks 2, 3, {what}")
    for text in job.sentences([2, 3]):
        assert text.startswith(f"the relay on {here} (pid {pid}), which connects the ranks there, {what}")


def test_a_server_that_ends_is_named_through_the_relay(job):
    job.connect_all()
    # All at once: else the server tells the others that it has lost the first relay.
    job.server._server.call(lambda: [peer.close() for peer in list(job.server._server._peers)])
    assert set(job.sentences(range(4))) == {"the launcher ended unexpectedly (killed, crashed, or out of memory)"}


def test_a_server_that_stops_in_good_order_ends_nothing(job):
    job.connect_all()
    job.server.stop()
    until(lambda: all(client.detached for client in job.clients.values()))
    assert not job.told


def test_a_rank_that_is_rejected_learns_why_in_the_same_words(job):
    job.connect(0)
    with pytest.raises(UsageError, match=r"two processes claim rank 0: pid \d+ on \S+ and pid \d+ on"):
        job.connect(9, claimed=0, host=1)
    assert "two processes claim rank 0" in job.sentences([0])[0]


def test_a_relay_without_ranks_ends_and_the_next_rank_starts_another(job):
    client = job.connect(0)
    first = client._relay
    client.leave()
    client.close()
    until(lambda: not alive(first))
    job.connect(0)
    assert job.relay_of(0) != first


def test_one_rank_at_a_time_starts_the_relay_and_a_failed_start_is_said(job, capsys, monkeypatch):
    name = relay_name((HOSTS[0], job.server.address[1]), SECRET)
    with relay_lock(name), pytest.raises(OSError, match="in use"), relay_lock(name):
        pass
    with socket.create_connection((HOSTS[0], job.server.address[1])) as server:
        assert "closed by the other side" in start_relay(name, server, b"other", 4, LIVENESS)
    with pytest.raises(ConnectionRefusedError):
        connect_to_relay(name, 1.0)
    monkeypatch.setattr("hvkeras.control.relay.sys.executable", "/nowhere/python")
    client = job.connect(0)
    assert client._relay is None
    assert "no relay on" in (said := capsys.readouterr().err) and "rank 0 connects directly" in said
    job.clients.clear()
    client.leave()
    client.close()


def test_few_ranks_and_one_host_have_no_relay():
    server = ControlServer(2, SECRET)
    server.start()
    for settings, launch in (({}, Launch("here", 0, 2, Rendezvous("run", "x:1"), 0, 1)),
                             ({"HVKERAS_RELAY_FROM": "0"}, Launch("here", 0, 2, Rendezvous("run", "x:1"), 0, 1)),
                             ({"HVKERAS_RELAY_FROM": "2"}, Launch("here", 0, 2, Rendezvous("run", "x:1"), 0, 2))):
        client = _connect_client(launch, Settings(settings), lambda _: None, Waiting(5.0), server.address, SECRET, None)
        assert isinstance(client, ControlClient) and client._relay is None
        client.leave()
        client.close()
        until(lambda: not server.connected)
    server.stop()


def test_what_is_equal_travels_once_and_each_rank_keeps_its_order():
    batch = Batch()
    for rank in (0, 1, 2):
        batch.add(rank, b"a")
    batch.add(1, b"b")
    batch.add(5, b"a")
    batch.add(5, b"b")
    taken = batch.take()
    assert taken is not None and batch.take() is None
    assert list(zip(taken.ranks, taken.bodies, strict=True)) == [([0, 2, 5, 5], b"a"), ([1, 1, 5, 5], b"b")]


@pytest.mark.parametrize("ranks", [[], [3], [0, 1, 2], [0, 2, 3, 7]])
def test_runs_are_ranks(ranks):
    assert from_runs(as_runs(ranks)) == ranks
