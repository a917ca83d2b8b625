"""The channel between `hvkeras bench` and rank 0 of each of its jobs: JSON messages over a socket in a folder.

Unlike the loopback interface, a folder is shared by all hosts that are network namespaces. Only the user who runs the
benchmark can open it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvkeras.errors import PeerError, explain

_NAME = "channel"
_MAX_BYTES = 16 * 1024 * 1024  # per message


class ChannelClosedError(PeerError):
    """The peer has closed the connection."""


class Channel:
    """Channel over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = bytearray()

    @classmethod
    def to(cls, folder: Path) -> Channel:
        """Connect to the listener in a folder."""
        connection = socket.socket(socket.AF_UNIX)
        with _address(folder) as address:
            connection.connect(address)
        return cls(connection)

    def send(self, message: Any) -> None:
        """Send a JSON-compatible message.

        Raises:
            ChannelClosedError: The peer has closed the connection.
        """
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, timeout: float | None = None) -> Any:
        """Receive the next message.

        Args:
            timeout: Seconds to wait; None to wait forever.

        Raises:
            TimeoutError: No message arrived in time; the call may be repeated.
            ChannelClosedError: The peer has closed the connection.
        """
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            self._connection.settimeout(timeout)
            try:
                more = self._connection.recv(65536)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            finally:
                self._connection.settimeout(None)
            if not more:
                raise ChannelClosedError("the peer closed the connection")
            self._read += more
            if len(self._read) > _MAX_BYTES:
                raise ChannelClosedError(explain(f"A message of a benchmark must be under {_MAX_BYTES} bytes"))
        text = bytes(self._read[:end])
        del self._read[: end + 1]
        return json.loads(text)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Listener:
    """Listening socket in a job's folder, to which rank 0 connects."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        with _address(folder) as address:
            self._socket.bind(address)
        self._socket.listen()

    def accept(self, timeout: float) -> Channel | None:
        """Wait for a connection; return None after the timeout in seconds."""
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        return Channel(connection)

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    # Through a descriptor, since the folder's path may exceed the maximum length of a socket address.
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        os.close(descriptor)
