"""The membership channel of an elastic job: launcher and workers over real sockets."""

from __future__ import annotations

import queue
import threading

import pytest

from hvkeras.control.membership_channel import ANY_FUNCTION, MembershipClient, MembershipServer
from hvkeras.control.messages import Assignment, ChangeAhead, FunctionDone, Ready, WorkerLeaving
from hvkeras.errors import PeerError, UsageError

SECRET = b"s" * 32


@pytest.fixture
def launcher():
    heard = queue.Queue()
    server = MembershipServer(SECRET, "127.0.0.1", lambda worker, message: heard.put((worker, message)), 15.0)
    server.start()
    yield server, heard
    server.stop()


def asked(client, *arguments):
    """Asks for the next generation, and returns a queue for the answer."""
    answers = queue.Queue()

    def ask():
        try:
            answers.put(client.next_generation(*arguments))
        except PeerError as error:
            answers.put(error)

    threading.Thread(target=ask).start()
    return answers


def test_a_worker_is_told_its_place_or_that_there_is_none(launcher):
    server, heard = launcher
    client = MembershipClient(server.address, SECRET, 3, 15.0)
    for answer in (Assignment(7, {"RANK": "1"}), FunctionDone()):
        answers = asked(client, 7, ANY_FUNCTION)
        assert heard.get(timeout=5.0) == (3, Ready(7, ANY_FUNCTION))
        server.send(3, answer)
        assert answers.get(timeout=5.0) == (answer if isinstance(answer, Assignment) else None)
    answers = asked(client, 7, 0)
    heard.get(timeout=5.0)
    server.stop()
    assert "its launcher is gone, or has ended it" in str(answers.get(timeout=5.0))
    client.close()


def test_a_change_is_known_until_the_next_generation(launcher):
    server, heard = launcher
    client = MembershipClient(server.address, SECRET, 0, 15.0)
    client.send(WorkerLeaving())
    assert heard.get(timeout=5.0) == (0, WorkerLeaving())
    server.send(5, ChangeAhead(soon=True, leaves=True))  # a worker that is not there
    server.send(0, ChangeAhead(soon=True, leaves=False))
    server.send(0, ChangeAhead(soon=False, leaves=True))
    for _ in range(100):
        if client.must_leave:
            break
        threading.Event().wait(0.05)
    assert client.hosts_changed and client.must_leave_soon and client.must_leave
    answers = asked(client, 1, 0)
    heard.get(timeout=5.0)
    assert not (client.hosts_changed or client.must_leave_soon or client.must_leave)
    server.send(0, FunctionDone())
    answers.get(timeout=5.0)
    client.close()


def test_a_second_process_with_a_workers_number_is_rejected(launcher):
    server, _ = launcher
    client = MembershipClient(server.address, SECRET, 0, 15.0)
    with pytest.raises(UsageError, match="worker 0 is connected already"):
        MembershipClient(server.address, SECRET, 0, 15.0)
    client.close()
