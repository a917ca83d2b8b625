"""Frames on the control channel: proof of the secret, then authenticated JSON.

The handshake is a mutual challenge-response over HMAC-SHA256 (the construction of RFC 2104): each side sends a random
nonce and proves that it knows the secret with a code over both nonces. The session key is derived from the same
values. It authenticates every later frame together with its direction and sequence number, so that frames cannot be
forged, replayed or reordered. A message that is larger than a frame takes several.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from typing import Any

from hvkeras.errors import PeerError, UsageError, explain

MAGIC = b"HVK2"
NONCE_BYTES = 32
CODE_BYTES = 32
HEADER = struct.Struct(">?I")  # whether more frames of the message follow; bytes of the payload
MAX_PAYLOAD = 4 * 1024 * 1024  # bytes of a frame
MAX_MESSAGE = 64 * MAX_PAYLOAD

Message = dict[str, Any]


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

    def close_frames(self, message: Message) -> bytes:
        """Seals a message; frames must be sent in the order in which they were sealed.

        Raises:
            UsageError: The message is too large.
        """
        payload = json.dumps(message).encode()
        if len(payload) > MAX_MESSAGE:
            raise UsageError(explain(f"A control message must be under {MAX_MESSAGE} bytes", "send tensors instead",
                                     type=message.get("type"), bytes=len(payload)))
        frames = []
        for start in range(0, len(payload), MAX_PAYLOAD):
            part = payload[start : start + MAX_PAYLOAD]
            header = HEADER.pack(start + MAX_PAYLOAD < len(payload), len(part))
            frames += [header, self._code(self._labels[0], self._sent, header, part), part]
            self._sent += 1
        return b"".join(frames)

    def open_frame(self, header: bytes, code: bytes, payload: bytes) -> Message | None:
        """Verifies the peer's next frame, and decodes the message that it completes.

        Returns:
            The message; None if more frames of it follow.

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
        message: Message = json.loads(b"".join(parts))
        return message


def payload_length(header: bytes) -> int:
    """Reads a frame's length, and rejects one that is too large.

    Raises:
        ProofError: The length is over the limit.
    """
    length: int = HEADER.unpack(header)[1]
    if length > MAX_PAYLOAD:
        raise ProofError(explain(f"A frame on the control channel must be under {MAX_PAYLOAD} bytes", length=length))
    return length
