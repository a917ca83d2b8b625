"""Frames on a channel: proof of the secret, then authenticated messages (`hvkeras.control.messages`).

The handshake is a mutual challenge-response over HMAC-SHA256 (the construction of RFC 2104): each side sends a random
nonce and proves that it knows the secret with a code over both nonces. The session key is derived from the same
values. It authenticates every later frame together with its direction and sequence number, so that frames cannot be
forged, replayed or reordered. A message that is larger than a frame takes several.
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

from hvkeras.errors import PeerError, UsageError, explain

MAGIC = b"HVK3"
NONCE_BYTES = 32
CODE_BYTES = 32
HEADER = struct.Struct(">?I")  # whether more frames of the message follow; bytes of the payload
MAX_PAYLOAD = 4 * 1024 * 1024  # bytes of a frame
MAX_MESSAGE = 64 * MAX_PAYLOAD
PROOF_DEADLINE = 10.0  # seconds a new connection has to prove the secret
MAX_UNPROVEN = 64  # connections that may try at the same time, where one is waited for
_TICK = 0.1  # seconds between two looks at who has proved it


class ProofError(PeerError):
    """A peer did not prove that it knows the job's secret, or a frame was tampered with."""


def nonce() -> bytes:
    """Generates a fresh challenge."""
    return os.urandom(NONCE_BYTES)


def proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Computes the code that `role` b"client" or b"server" presents as proof, or the session key for b"session"."""
    return hmac.new(secret, role + server_nonce + client_nonce, hashlib.sha256).digest()


def check_proof(shown: bytes, wanted: bytes) -> None:
    """Compares two codes in constant time.

    Raises:
        ProofError: They differ.
    """
    if not hmac.compare_digest(shown, wanted):
        raise ProofError(explain("A peer on the control channel must prove the job's secret",
                                 "another job or program uses this address; restart this job"))


class Seal:
    """Seals messages into authenticated frames in one direction, and verifies frames in the other.

    Args:
        key: The session key.
        outgoing: This side's role, b"client" or b"server".
        incoming: The peer's role.
    """

    def __init__(self, key: bytes, outgoing: bytes, incoming: bytes) -> None:
        self._key = key
        self._labels = (outgoing, incoming)
        self._sent = 0
        self._received = 0
        self._parts: list[bytes] = []  # of a message whose frames have not all arrived

    def _code(self, label: bytes, number: int, header: bytes, payload: bytes) -> bytes:
        return hmac.new(self._key, label + struct.pack(">Q", number) + header + payload, hashlib.sha256).digest()

    def close_frames(self, payload: bytes) -> bytes:
        """Seals an encoded message; frames must be sent in the order in which they were sealed.

        Raises:
            UsageError: The message is too large.
        """
        if len(payload) > MAX_MESSAGE:
            raise UsageError(explain(f"A control message must be under {MAX_MESSAGE} bytes", "send tensors instead",
                                     begins=payload[:40], bytes=len(payload)))
        frames = []
        for start in range(0, len(payload), MAX_PAYLOAD):
            part = payload[start : start + MAX_PAYLOAD]
            header = HEADER.pack(start + MAX_PAYLOAD < len(payload), len(part))
            frames += [header, self._code(self._labels[0], self._sent, header, part), part]
            self._sent += 1
        return b"".join(frames)

    def open_frame(self, header: bytes, code: bytes, payload: bytes) -> bytes | None:
        """Verifies the peer's next frame.

        Returns:
            The encoded message that it completes; None if more frames follow.

        Raises:
            ProofError: The frame is not the peer's next one, or the message is too large.
        """
        check_proof(code, self._code(self._labels[1], self._received, header, payload))
        self._received += 1
        self._parts.append(payload)
        if sum(map(len, self._parts)) > MAX_MESSAGE:
            raise ProofError(explain(f"A control message must be under {MAX_MESSAGE} bytes"))
        if HEADER.unpack(header)[0]:
            return None
        parts, self._parts = self._parts, []
        return b"".join(parts)


def payload_length(header: bytes) -> int:
    """Reads a frame's length, and rejects one that is too large.

    Raises:
        ProofError: The length is over the limit.
    """
    length: int = HEADER.unpack(header)[1]
    if length > MAX_PAYLOAD:
        raise ProofError(explain(f"A frame on the control channel must be under {MAX_PAYLOAD} bytes", length=length))
    return length


def exactly(connected: socket.socket, count: int, until: float | None = None,
            still: Callable[[], None] | None = None) -> bytes:
    """Reads so many bytes.

    Args:
        connected: A connected socket.
        count: The number of bytes.
        until: The monotonic time by which they must be there; by default, the socket's own timeout counts.
        still: Called whenever that timeout has passed, instead of giving up; raises if that is to be given up.

    Raises:
        ConnectionError: The other side has closed the connection.
        TimeoutError: The bytes did not come in time.
    """
    data, got = bytearray(count), 0
    while got < count:
        if until is not None:
            connected.settimeout(max(until - time.monotonic(), 1e-3))
        try:
            more = connected.recv_into(memoryview(data)[got:])
        except TimeoutError:
            if still is None:
                raise
            still()
            continue
        if not more:
            raise ConnectionError("the connection was closed by the other side")
        got += more
    return bytes(data)


def prove_to_server(connected: socket.socket, secret: bytes, still: Callable[[], None] | None = None) -> Seal:
    """Proves the secret to the side that has accepted the connection.

    Args:
        connected: A connected socket.
        secret: The secret.
        still: See `exactly`.

    Raises:
        ProofError: The other side does not know the secret.
        OSError: The connection has ended, or the other side does not answer.
    """
    challenge = exactly(connected, len(MAGIC) + NONCE_BYTES, still=still)
    if not challenge.startswith(MAGIC):
        raise ProofError(explain("The address must be hvkeras's own", "another program listens there",
                                      first_bytes=challenge[:8]))
    theirs, own = challenge[len(MAGIC) :], nonce()
    connected.sendall(own + proof(secret, b"client", theirs, own))
    check_proof(exactly(connected, CODE_BYTES, still=still), proof(secret, b"server", theirs, own))
    return Seal(proof(secret, b"session", theirs, own), b"client", b"server")


def prove_to_client(connected: socket.socket, secret: bytes) -> None:
    """Proves the secret to the side that has connected, within `PROOF_DEADLINE`.

    Raises:
        ProofError: The other side does not know the secret.
        OSError: The connection has ended, or the other side does not answer.
    """
    until, own = time.monotonic() + PROOF_DEADLINE, nonce()
    connected.sendall(MAGIC + own)
    answer = exactly(connected, NONCE_BYTES + CODE_BYTES, until)
    theirs, shown = answer[: NONCE_BYTES], answer[NONCE_BYTES :]
    check_proof(shown, proof(secret, b"client", own, theirs))
    connected.sendall(proof(secret, b"server", own, theirs))


def accept_proven(listening: socket.socket, secret: bytes, timeout: float) -> socket.socket:
    """Accepts the first connection whose other side proves the secret; all others are closed.

    Args:
        listening: A listening socket.
        secret: The secret.
        timeout: Seconds to wait.

    Raises:
        PeerError: Nobody has proved it in time.
    """
    proven: collections.deque[socket.socket] = collections.deque()
    room = threading.BoundedSemaphore(MAX_UNPROVEN)

    def prove(connected: socket.socket) -> None:
        try:
            prove_to_client(connected, secret)
            proven.append(connected)
        except (OSError, ProofError):
            connected.close()
        finally:
            room.release()

    listening.settimeout(_TICK)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if proven:
            return proven.popleft()
        with contextlib.suppress(TimeoutError):
            connected, _ = listening.accept()
            if room.acquire(blocking=False):
                threading.Thread(target=prove, args=(connected,), name="hvkeras-proof", daemon=True).start()
            else:
                connected.close()
    raise PeerError(explain(f"A peer must connect within {timeout:g} s, and prove the secret",
                            "check the network between the hosts"))
