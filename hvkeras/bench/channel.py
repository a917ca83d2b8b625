"""The channel between `hvkeras bench` and rank 0 of each of its jobs: JSON messages over the loopback interface."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from typing import Any

from hvkeras.errors import PeerError

_LOOPBACK = "127.0.0.1"
_GREETING_TIMEOUT = 10.0  # seconds in which a client must send the key


class ChannelClosedError(PeerError):
    """The peer has closed the connection."""


class Channel:
    """One end of the channel.

    Args:
        connection: The connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    @classmethod
    def to(cls, port: int, key: str) -> Channel:
        """Connects and sends the key."""
        channel = cls(socket.create_connection((_LOOPBACK, port)))
        channel.send(key)
        return channel

    def send(self, message: Any) -> None:
        """Sends a message that JSON can represent.

        Raises:
            ChannelClosedError: The peer has closed the connection.
        """
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, timeout: float | None = None) -> Any:
        """Receives the next message.

        Args:
            timeout: Seconds to wait for it; None to wait forever.

        Raises:
            TimeoutError: No message arrived in time; the call may be repeated.
            ChannelClosedError: The peer has closed the connection.
        """
        while b"\n" not in self._read:
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
                raise ChannelClosedError("the other end closed the connection")
            self._read += more
        text, _, self._read = self._read.partition(b"\n")
        return json.loads(text)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


class Listener:
    """The listening socket to which rank 0 of a job connects.

    Attributes:
        port: The port on this machine.
        key: The secret that a client must send.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server((_LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]
        self.key = secrets.token_hex(16)

    def accept(self, timeout: float) -> Channel | None:
        """Waits for a connection that sends the key; returns None if there was none."""
        self._socket.settimeout(timeout)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        channel = Channel(connection)
        try:
            shown = channel.receive(_GREETING_TIMEOUT)
        except (TimeoutError, ValueError, ChannelClosedError):
            shown = None
        if isinstance(shown, str) and hmac.compare_digest(shown, self.key):
            return channel
        channel.close()
        return None

    def close(self) -> None:
        """Stops accepting connections."""
        self._socket.close()
