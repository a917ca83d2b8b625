"""The store for Horovod's Gloo: what it takes, and from whom."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from hvkeras.backends.horovod import gloo
from hvkeras.backends.horovod.installed import has_gloo

LARGEST = gloo._VALUE + 2 * gloo._VALUE_FOR_A_RANK


@pytest.fixture(autouse=True)
def needs_gloo() -> None:
    if not has_gloo():
        pytest.skip("Horovod with Gloo is not installed")


@pytest.fixture
def peers() -> set[str]:
    return {"127.0.0.1"}


@pytest.fixture
def port(peers: set[str]) -> Iterator[int]:
    server = gloo.bounded_store("127.0.0.1", 2, peers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def ask(port: int, method: str, path: str, body: bytes | None = None, length: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request(method, path, body, {"Content-Length": length} if length is not None else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_values_of_peers_are_kept_within_bounds(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(port, "PUT", "/global/0", b"here") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, b"here")
    assert ask(port, "GET", "/global/1")[0] == 404
    assert ask(port, "PUT", "/global/1", length=str(LARGEST + 1))[0] == 413
    for length in ("-1", "many"):
        assert ask(port, "PUT", "/global/1", length=length)[0] == 411
    for path in ("/global/0/1", "/global", "/global/" + "x" * 1024):
        assert ask(port, "GET", path)[0] == 400
    assert ask(port, "HEAD", "/global/0")[0] == 405  # files of the current folder, else
    assert ask(port, "DELETE", "/global/0")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_there_is_an_end_to_keys(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [ask(port, "PUT", f"/more/{number}", b"x" * LARGEST)[0] for number in range(75)]
    assert codes == [200] * 72 + [413] * 3


def test_unknown_clients_are_not_answered(port: int, peers: set[str]) -> None:
    peers.clear()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(port, "GET", "/global/0")
