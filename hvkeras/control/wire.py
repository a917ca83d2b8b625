"""Frames on a channel: mutual authentication, then authenticated messages (`hvkeras.control.messages`).

The handshake is a mutual challenge-response over HMAC-SHA256 (the construction of RFC 2104). Each side sends a random
nonce, and authenticates with a code over both nonces that is keyed with the secret. The session key is derived from the
same values. It authenticates every later frame together with its direction and sequence number, so that frames cannot
be forged, replayed or reordered. Between processes of one user on a Unix socket the kernel guarantees that, and frames
have no code. A message that is larger than a frame takes several.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.host.network import local_peer

MAGIC = b"HVK3"
NONCE_BYTES = 32
CODE_BYTES = 32
_NO_CODE = bytes(CODE_BYTES)
HEADER = struct.Struct(">?I")  # more frames of the message follow; bytes of the payload
MAX_PAYLOAD = 4 * 1024 * 1024  # bytes of a frame
MAX_MESSAGE = 64 * MAX_PAYLOAD
COPIED = 64 * 1024  # bytes up to which a message is joined with its header, to save a system call
AUTHENTICATION_DEADLINE = 10.0  # seconds for a new connection to authenticate
MAX_UNAUTHENTICATED = 64  # concurrent connections in `accept_authenticated`
_TICK = 0.1  # seconds between two checks for an authenticated connection


class AuthenticationError(PeerError):
    """A peer did not authenticate with the job's secret, or a frame was tampered with."""


def nonce() -> bytes:
    """Generate a fresh challenge."""
    return os.urandom(NONCE_BYTES)


def authentication_code(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Compute the authentication code of `role` b"client" or b"server", or the session key for b"session"."""
    return hmac.digest(secret, role + server_nonce + client_nonce, "sha256")


def session_key(connected: Any, secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the key of the frames on a connection; empty for a connection to a process of the same user on this host.

    Nobody else can write on such a connection, a Unix socket: the kernel has identified the peer.
    """
    peer = local_peer(connected)
    if peer is not None and peer[1] == os.geteuid():
        return b""
    return authentication_code(secret, b"session", server_nonce, client_nonce)


def verify_code(received: bytes, expected: bytes) -> None:
    """Compare two codes in constant time.

    Raises:
        AuthenticationError: They differ.
    """
    if not hmac.compare_digest(received, expected):
        raise AuthenticationError(explain("A peer on the control channel must authenticate with the job's secret",
                                 "another job or program uses this address; restart this job"))


class Seal:
    """Encoder of authenticated frames in one direction, and verifier of frames in the other.

    Args:
        key: The session key; empty for frames without a code, where the kernel identifies the peer.
        outgoing: This side's role, b"client" or b"server".
    """

    def __init__(self, key: bytes, outgoing: bytes, incoming: bytes) -> None:
        self._key = key
        self._labels = (outgoing, incoming)
        self._sent = 0
        self._received = 0
        self._parts: list[bytes | bytearray] = []  # frames of an incomplete message

    def _code(self, label: bytes, number: int, header: bytes, payload: bytes | bytearray | memoryview) -> bytes:
        if not self._key:
            return _NO_CODE
        begin = label + struct.pack(">Q", number) + header
        if len(payload) <= COPIED:
            return hmac.digest(self._key, begin + payload, "sha256")
        code = hmac.new(self._key, begin, hashlib.sha256)
        code.update(payload)
        return code.digest()

    def close_frames(self, payload: bytes | memoryview) -> list[bytes | memoryview]:
        """Encode a message as authenticated frames, which must be sent in the order of encoding.

        Returns:
            The bytes to send, in pieces; those of a large message are views of it, which many connections can share.

        Raises:
            UsageError: The message is too large.
        """
        if len(payload) > MAX_MESSAGE:
            raise UsageError(explain(f"A control message must be under {MAX_MESSAGE} bytes", "send tensors instead",
                                     begins=bytes(payload[:40]), bytes=len(payload)))
        view, pieces = memoryview(payload), list[bytes | memoryview]()
        for start in range(0, len(payload), MAX_PAYLOAD):
            part = view[start : start + MAX_PAYLOAD]
            header = HEADER.pack(start + MAX_PAYLOAD < len(payload), len(part))
            pieces += [header + self._code(self._labels[0], self._sent, header, part), part]
            self._sent += 1
        return pieces if len(payload) > COPIED else [b"".join(pieces)]

    def open_frame(self, header: bytes, code: bytes, payload: bytes | bytearray) -> bytes | bytearray | None:
        """Verify the peer's next frame.

        Returns:
            The encoded message that it completes; None if more frames follow.

        Raises:
            AuthenticationError: The frame is not the peer's next one, or the message is too large.
        """
        verify_code(code, self._code(self._labels[1], self._received, header, payload))
        self._received += 1
        self._parts.append(payload)
        if sum(map(len, self._parts)) > MAX_MESSAGE:
            raise AuthenticationError(explain(f"A control message must be under {MAX_MESSAGE} bytes"))
        if HEADER.unpack(header)[0]:
            return None
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)


def payload_length(header: bytes) -> int:
    """Return a frame's length, and reject one that is too large.

    Raises:
        AuthenticationError: The length is over the limit.
    """
    length: int = HEADER.unpack(header)[1]
    if length > MAX_PAYLOAD:
        raise AuthenticationError(explain(f"A frame on the control channel must be under {MAX_PAYLOAD} bytes",
                                          length=length))
    return length


def receive_exactly(connected: socket.socket, count: int, until: float | None = None,
                    on_timeout: Callable[[], None] | None = None) -> bytearray:
    """Receive exactly `count` bytes.

    Args:
        count: The number of bytes.
        until: The monotonic time of the deadline; by default, the socket's own timeout applies.
        on_timeout: Called on each timeout of the socket; raises to give up.

    Raises:
        ConnectionError: The other side has closed the connection.
        TimeoutError: The bytes did not arrive in time.
    """
    data, got = bytearray(count), 0
    while got < count:
        if until is not None:
            connected.settimeout(max(until - time.monotonic(), 1e-3))
        try:
            more = connected.recv_into(memoryview(data)[got:])
        except TimeoutError:
            if on_timeout is None:
                raise
            on_timeout()
            continue
        if not more:
            raise ConnectionError("the connection was closed by the other side")
        got += more
    return data


def authenticate_to_server(connected: socket.socket, secret: bytes,
                           on_timeout: Callable[[], None] | None = None) -> Seal:
    """Authenticate on a connection to a server, and verify the server.

    Args:
        on_timeout: See `receive_exactly`.

    Raises:
        AuthenticationError: The other side fails to authenticate.
        OSError: The connection has ended, or the other side does not answer.
    """
    challenge = bytes(receive_exactly(connected, len(MAGIC) + NONCE_BYTES, on_timeout=on_timeout))
    if not challenge.startswith(MAGIC):
        raise AuthenticationError(explain("The address must be that of hvkeras's server",
                                          "stop the program that listens there, or use another address",
                                          first_bytes=challenge[:8]))
    theirs, own = challenge[len(MAGIC) :], nonce()
    connected.sendall(own + authentication_code(secret, b"client", theirs, own))
    verify_code(bytes(receive_exactly(connected, CODE_BYTES, on_timeout=on_timeout)),
                authentication_code(secret, b"server", theirs, own))
    return Seal(session_key(connected, secret, theirs, own), b"client", b"server")


def authenticate_to_client(connected: socket.socket, secret: bytes) -> None:
    """Authenticate on an accepted connection, and verify the client, within `AUTHENTICATION_DEADLINE`.

    Raises:
        AuthenticationError: The other side fails to authenticate.
        OSError: The connection has ended, or the other side does not answer.
    """
    until, own = time.monotonic() + AUTHENTICATION_DEADLINE, nonce()
    connected.sendall(MAGIC + own)
    answer = bytes(receive_exactly(connected, NONCE_BYTES + CODE_BYTES, until))
    theirs, code = answer[: NONCE_BYTES], answer[NONCE_BYTES :]
    verify_code(code, authentication_code(secret, b"client", own, theirs))
    connected.sendall(authentication_code(secret, b"server", own, theirs))


def accept_authenticated(listening: socket.socket, secret: bytes, timeout: float) -> socket.socket:
    """Accept the first connection whose peer authenticates; all others are closed.

    Args:
        timeout: Seconds to wait.

    Raises:
        PeerError: No peer has authenticated in time.
    """
    authenticated: collections.deque[socket.socket] = collections.deque()
    slots = threading.BoundedSemaphore(MAX_UNAUTHENTICATED)

    def authenticate(connected: socket.socket) -> None:
        try:
            authenticate_to_client(connected, secret)
            authenticated.append(connected)
        except (OSError, AuthenticationError):
            connected.close()
        finally:
            slots.release()

    listening.settimeout(_TICK)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if authenticated:
            return authenticated.popleft()
        with contextlib.suppress(TimeoutError):
            connected, _ = listening.accept()
            if slots.acquire(blocking=False):
                threading.Thread(target=authenticate, args=(connected,), name="hvkeras-authenticate",
                                 daemon=True).start()
            else:
                connected.close()
    raise PeerError(explain(f"A peer must connect within {timeout:g} s, and authenticate",
                            "check the network between the hosts"))
