"""A bounded key-value store for Gloo's rendezvous: Horovod's own store accepts any amount of data from any client.

Horovod's clients cannot prove knowledge of a secret, so the store admits clients by address and limits the amount of
data.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from hvkeras.horovod.as_horovod import horovod_itself

LONGEST_PATH = 1024  # characters of scope and key
_KEYS, _KEYS_OF_A_RANK = 1024, 64
_VALUE, _VALUE_FOR_A_RANK = 64 * 1024, 4 * 1024  # bytes; a rank stores an address for each other rank
_REQUESTS, _REQUESTS_OF_A_RANK = 64, 8  # concurrently


def bounded_store(address: str, size: int, peers: Collection[str]) -> Any:
    """Creates the store, which listens but does not answer requests yet.

    Args:
        address: The address to listen on, at a free port.
        size: The number of ranks.
        peers: The client addresses that are admitted; requests from other addresses are not answered.

    Returns:
        A server with the interface of Horovod's own.
    """
    with horovod_itself():
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    largest = _VALUE + _VALUE_FOR_A_RANK * size
    most_keys = _KEYS + _KEYS_OF_A_RANK * size
    most_bytes = largest * (_KEYS_OF_A_RANK + 4 * size)

    class Handler(RendezvousHandler):  # type: ignore[misc]  # Horovod ships no types
        def parse_request(self) -> bool:
            """Rejects requests that Horovod's clients never make, before they are processed."""
            if not super().parse_request():
                return False
            wrong = _wrong(self.command, self.path) or (self._wrong_with_value() if self.command == "PUT" else 0)
            if wrong:
                self.close_connection = True
                self.send_status_code(int(wrong))
            return not wrong

        def _wrong_with_value(self) -> int:
            text = self.headers.get("Content-Length", "")
            if not (text.isascii() and text.isdecimal()):
                return HTTPStatus.LENGTH_REQUIRED
            with self.server.cache_lock:
                values = [len(value) for scope in self.server.cache.values() for value in scope.values()]
            full = len(values) >= most_keys or sum(values) + int(text) > most_bytes
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE if full or int(text) > largest else 0

    class Store(RendezvousHTTPServer):  # type: ignore[misc]  # Horovod ships no types
        daemon_threads = True
        room = threading.BoundedSemaphore(_REQUESTS + _REQUESTS_OF_A_RANK * size)

        def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base's signature
            """Admits only peers, and only a limited number of concurrent requests."""
            return client_address[0] in peers and self.room.acquire(blocking=False)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            """Answers a request in its own thread."""
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.room.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Prints nothing: the control channel reports missing peers."""

    return Store((address, 0), Handler, 0)


def _wrong(command: str, path: str) -> int:
    """Returns the HTTP status code for an invalid request; 0 for a valid one."""
    if command not in ("GET", "PUT", "DELETE"):  # HEAD would disclose files in the current folder
        return HTTPStatus.METHOD_NOT_ALLOWED
    if len(path) > LONGEST_PATH or path.count("/") != 2 or path[0] != "/":
        return HTTPStatus.BAD_REQUEST
    return 0
