"""Gloo's rendezvous for jobs that horovodrun did not start, and Gloo's connections, which an abort shuts down.

Horovod's own key-value store accepts any amount of data from any client. Horovod's clients cannot authenticate, so the
bounded store accepts only the addresses of the job's hosts, and limits the amount of data.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from hvkeras.backends.interface import Start
from hvkeras.control.launch_environments.horovod_variables import topology_variables
from hvkeras.errors import MachineError, explain
from hvkeras.horovod.as_horovod import horovod_itself
from hvkeras.host.network import LOOPBACK, interface_of, own_addresses, own_name_resolves_to
from hvkeras.host.program import env
from hvkeras.host.topology import topology_from_hosts

LONGEST_PATH = 1024  # characters of scope and key
_KEYS, _KEYS_OF_A_RANK = 1024, 64
_VALUE, _VALUE_FOR_A_RANK = 64 * 1024, 4 * 1024  # bytes; a rank stores an address for each other rank
_REQUESTS, _REQUESTS_OF_A_RANK = 64, 8  # concurrently


def bounded_store(address: str, size: int, peers: Collection[str]) -> Any:
    """Create the store, which listens but does not answer requests yet.

    Args:
        address: The address to listen on, at a free port.
        peers: The accepted client addresses; requests from other addresses are not answered.

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
            """Reject requests that Horovod's clients never make, before they are processed."""
            if not super().parse_request():
                return False
            error = _error_of_request(self.command, self.path) or (
                self._error_of_value() if self.command == "PUT" else 0)
            if error:
                self.close_connection = True
                self.send_status_code(int(error))
            return not error

        def _error_of_value(self) -> int:
            text = self.headers.get("Content-Length", "")
            if not (text.isascii() and text.isdecimal()):
                return HTTPStatus.LENGTH_REQUIRED
            with self.server.cache_lock:
                values = [len(value) for scope in self.server.cache.values() for value in scope.values()]
            full = len(values) >= most_keys or sum(values) + int(text) > most_bytes
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE if full or int(text) > largest else 0

    class Store(RendezvousHTTPServer):  # type: ignore[misc]  # Horovod ships no types
        daemon_threads = True
        request_slots = threading.BoundedSemaphore(_REQUESTS + _REQUESTS_OF_A_RANK * size)

        def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base's signature
            """Accept only peers, and only a limited number of concurrent requests."""
            return client_address[0] in peers and self.request_slots.acquire(blocking=False)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            """Release the request's slot after it was answered, in its own thread."""
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.request_slots.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing: the control channel reports missing peers."""

    return Store((address, 0), Handler, 0)


def _error_of_request(command: str, path: str) -> int:  # an HTTP status code, or 0
    if command not in ("GET", "PUT", "DELETE"):  # HEAD would disclose files in the current folder
        return HTTPStatus.METHOD_NOT_ALLOWED
    if len(path) > LONGEST_PATH or path.count("/") != 2 or path[0] != "/":
        return HTTPStatus.BAD_REQUEST
    return 0


# Allows process sets to be added later. In each of its cycles, Horovod's thread then holds the lock of all sets during
# a collective, and new collectives wait for that lock. When a rank fails, both continue at the same moment. A new
# collective that is enqueued after the thread has failed all outstanding ones then hangs.
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
# Without the stall check, Horovod prints no long lists of tensor names for a straggler: the control channel logs
# stragglers in one line.
_ALWAYS = {DYNAMIC_SETS: "1", "HOROVOD_STALL_CHECK_DISABLE": "1"}


@contextlib.contextmanager
def horovod_variables(more: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that Horovod's core reads at startup, within the context; hvkeras writes the timeline."""
    variables = {**{name: value for name, value in _ALWAYS.items() if name not in os.environ}, **more}
    with env(**variables, HOROVOD_TIMELINE=None):
        yield


class GlooRendezvous:
    """Key-value store for Gloo on rank 0, bound to one interface, and the environment variables that point to it.

    Args:
        start: The start parameters of the backend.
        previous: The store of an earlier session, which this one replaces.
    """

    def __init__(self, start: Start, previous: GlooRendezvous | None) -> None:
        assert start.control is not None
        topology = start.topology
        address = LOOPBACK if topology.is_one_host else start.control.local_address
        if previous is not None:
            previous.close()
        peers: set[str] = {LOOPBACK}
        self._server: Any = self._serve(start, address, peers) if topology.rank == 0 else None
        mine = [address, self._server.server_address[1] if self._server is not None else 0, own_addresses()]
        everyone = start.control.gather("gloo rendezvous", mine, start.settings.start_timeout)
        host, port, _ = everyone[0]
        if self._server is not None:  # earlier requests wait until the store serves
            peers.update(each for _, _, own in everyone for each in own)
            threading.Thread(target=self._server.serve_forever, name="hvkeras-gloo-store", daemon=True).start()
        self.variables: dict[str, str] = {
            **topology_variables(topology),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(host),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": interface_of(address),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(max(1, start.settings.start_timeout))),
        }

    def _serve(self, start: Start, address: str, peers: set[str]) -> Any:
        with horovod_itself():
            from horovod.runner.common.util.hosts import SlotInfo

        server = bounded_store(address, start.topology.size, peers)
        hosts = start.topology.hosts
        slots = []
        for rank, host in enumerate(hosts):
            index = topology_from_hosts(rank, hosts)
            slots.append(SlotInfo(host, rank, index.local_rank, index.cross_rank, index.size, index.local_size,
                                  index.cross_size))
        server.init(slots)
        return server

    def wait_for_others(self, seconds: float = 2.0) -> None:
        """Wait briefly for the other ranks' engines to delete their keys, because the store ends with rank 0."""
        deadline = time.monotonic() + seconds
        while self._server is not None and self._server.cache.get("global") and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """Shut down the store."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def check_own_name(is_one_host: bool) -> None:
    """Check that this host's name resolves: Gloo publishes the resulting address, and crashes without one.

    Args:
        is_one_host: Whether all ranks are on this host; then the loopback address suffices.

    Raises:
        MachineError: The name does not resolve, or resolves to the loopback address, which other hosts cannot reach.
    """
    name, found = socket.gethostname(), own_name_resolves_to()
    if not found or (not is_one_host and ipaddress.ip_address(found).is_loopback):
        reached = "an address" if is_one_host else "an address that the other hosts reach"
        raise MachineError(explain(f"Horovod's Gloo needs each host's own name to resolve to {reached}",
                                   f"write {LOOPBACK if is_one_host else 'that address'} and {name} into /etc/hosts on"
                                   " this host, or use mpirun or the tfdist backend", host=name,
                                   resolves_to=found or None))


_FOLDER = "/proc/self/fd"


class Connections:
    """The sockets that were opened while Horovod connected ranks."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Record the sockets that Horovod opens within the context."""
        before = _sockets()
        yield
        self._found |= {descriptor: link for descriptor, link in _sockets().items()
                        if before.get(descriptor) != link}

    def forget(self) -> None:
        """Discard all records, after Horovod has closed its connections."""
        self._found.clear()

    def shut_down(self) -> None:
        """Shut down all connections, so that threads which wait for data return. Horovod closes them itself."""
        now = _sockets()
        for descriptor, link in self._found.items():
            if now.get(descriptor) == link:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Return this process's sockets: for each descriptor, the link in /proc, with the socket's inode number."""
    found = {}
    for name in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):
            link = os.readlink(f"{_FOLDER}/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found
