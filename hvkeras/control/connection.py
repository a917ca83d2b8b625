"""A peer's connection to a message server: authentication, then messages in both directions."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hvkeras.control import wire
from hvkeras.control.messages import Arrived, Hello, Message, Rejected, decode, encode
from hvkeras.errors import UsageError
from hvkeras.host.forks import detach_in_children

_attempts = itertools.count()  # per process, so that a server that was stopped can identify the latest connection


@dataclass(frozen=True)
class Introduction:
    """A peer's description of itself when it connects: its rank or number, a size, and its host."""

    rank: int
    size: int
    host: str


class Connection:
    """An authenticated and admitted connection.

    Args:
        on_timeout: Called each time the server has not answered within the socket's timeout; raises to give up. A
            server that admits a thousand peers is slow, and reconnecting makes it slower.

    Attributes:
        closed: Set once this end closes the connection.

    Raises:
        AuthenticationError: The server fails to authenticate.
        UsageError: The server rejects this peer; the message gives the reason.
    """

    def __init__(self, connected: socket.socket, secret: bytes, introduction: Introduction,
                 on_timeout: Callable[[], None] | None = None) -> None:
        self.introduction = introduction
        self.closed: threading.Event = threading.Event()
        self._socket = connected
        self._sending = threading.Lock()
        self._threads: list[threading.Thread] = []
        detach_in_children(self)
        # else the second of two small messages would wait for an acknowledgement
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._seal = wire.authenticate_to_server(connected, secret, on_timeout)
        self.send(Hello(introduction.rank, introduction.size, introduction.host, os.getpid(), next(_attempts)))
        answer = self.read(on_timeout)
        if isinstance(answer, Rejected):
            raise UsageError(answer.reason)
        self.send(Arrived())
        connected.settimeout(None)

    @property
    def local_address(self) -> str:
        """This host's address on the route to the server, and thus to the other hosts; "" when connected to a relay."""
        return "" if self._socket.family == socket.AF_UNIX else str(self._socket.getsockname()[0])

    def in_child(self) -> None:
        """Close a forked process's copy of the connection, so that it closes when the peer's own process exits."""
        self._sending, self.closed = threading.Lock(), threading.Event()
        self.closed.set()
        self._socket.close()

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that ends once the connection is closed."""
        self._threads.append(thread)
        thread.start()

    def read(self, on_timeout: Callable[[], None] | None = None) -> Message:
        """Wait for the next message.

        Args:
            on_timeout: See the class.

        Raises:
            OSError: The connection has ended.
            AuthenticationError: A frame failed authentication.
        """
        return decode(self.receive(on_timeout).decode())  # the temporary frees a large message's bytes

    def receive(self, on_timeout: Callable[[], None] | None = None) -> bytes | bytearray:
        """Wait for the next message, and return it encoded; otherwise like `read`."""
        data = None
        while data is None:
            prefix = bytes(wire.receive_exactly(self._socket, wire.HEADER.size + wire.CODE_BYTES,
                                                on_timeout=on_timeout))
            header, code = prefix[: wire.HEADER.size], prefix[wire.HEADER.size :]
            payload = wire.receive_exactly(self._socket, wire.payload_length(header), on_timeout=on_timeout)
            data = self._seal.open_frame(header, code, payload)
        return data

    def send(self, message: Message) -> None:
        """Send a message, from any thread. The reading side detects a broken connection."""
        data = encode(message)
        with self._sending, contextlib.suppress(OSError):
            for piece in self._seal.close_frames(data):
                self._socket.sendall(piece)

    def stop_reading(self) -> None:
        """Keep the connection open until this process exits, so that the server detects the exit."""
        self.closed.set()
        with contextlib.suppress(OSError):
            os.dup(self._socket.fileno())  # Python closes its own descriptor before it runs finalizers
            self._socket.shutdown(socket.SHUT_RD)
        self._join_threads()

    def close(self) -> None:
        """Close the connection and stop the threads."""
        self.closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._join_threads()

    def _join_threads(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)
