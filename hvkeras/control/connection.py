"""A rank's connection to the control server: the proof of the job's secret, and authenticated messages both ways."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from dataclasses import dataclass

from hvkeras.control import wire
from hvkeras.control.proof import exactly, prove_to_server
from hvkeras.errors import UsageError
from hvkeras.host.forks import detach_in_children

_attempts = itertools.count()  # of this process: a server that stood still meanwhile learns which one is the last


@dataclass(frozen=True)
class Introduction:
    """What a rank reports about itself when it connects."""

    rank: int
    size: int
    host: str


class Connection:
    """A connection that has proved the secret and registered this rank.

    Args:
        connected: A connected socket.
        secret: The job's secret.
        introduction: What this rank reports about itself.

    Raises:
        ProofError: The server does not know the secret.
        UsageError: The server refuses this rank; the message gives the reason.
    """

    def __init__(self, connected: socket.socket, secret: bytes, introduction: Introduction) -> None:
        self.introduction = introduction
        self._socket = connected
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        detach_in_children(self)
        self._seal = prove_to_server(connected, secret)
        self._send({"type": "hello", "rank": introduction.rank, "size": introduction.size, "host": introduction.host,
                    "pid": os.getpid(), "attempt": next(_attempts)})
        answer = self._read()
        if answer["type"] == "refused":
            raise UsageError(answer["reason"])
        self._send({"type": "arrived"})
        connected.settimeout(None)

    @property
    def local_address(self) -> str:
        """This host's address on the route to the server, and therefore to the other hosts."""
        return str(self._socket.getsockname()[0])

    def in_child(self) -> None:
        """Closes a forked process's copy of the connection, which must close when the rank's own process exits."""
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._closed.set()
        self._socket.close()

    def _read(self) -> wire.Message:
        message = None
        while message is None:
            header = exactly(self._socket, wire.HEADER.size)
            code = exactly(self._socket, wire.CODE_BYTES)
            message = self._seal.open_frame(header, code, exactly(self._socket, wire.payload_length(header)))
        return message

    def _send(self, message: wire.Message) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(self._seal.close_frames(message))

    def stop_reading(self) -> None:
        """Keeps the connection open until this process exits, so that the server sees when that happens."""
        self._closed.set()
        with contextlib.suppress(OSError):
            os.dup(self._socket.fileno())  # Python closes its own descriptor before it runs finalizers
            self._socket.shutdown(socket.SHUT_RD)
        self._join_threads()

    def close(self) -> None:
        """Closes the connection and stops the threads."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._join_threads()

    def _join_threads(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)
