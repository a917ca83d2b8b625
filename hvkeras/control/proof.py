"""The proof of a secret over a connected socket, after which both sides know that the other one has it."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

from hvkeras.control import wire
from hvkeras.errors import PeerError, explain

PROOF_DEADLINE = 10.0  # seconds a new connection has to prove the secret
MAX_UNPROVEN = 64  # connections that may try at the same time
_TICK = 0.1  # seconds between two looks at who has proved it


def exactly(connected: socket.socket, count: int, until: float | None = None) -> bytes:
    """Reads so many bytes.

    Args:
        connected: A connected socket.
        count: The number of bytes.
        until: The monotonic time by which they must be there; by default, the socket's own timeout counts.

    Raises:
        ConnectionError: The other side has closed the connection.
        TimeoutError: The bytes did not come in time.
    """
    parts = []
    while count:
        if until is not None:
            connected.settimeout(max(until - time.monotonic(), 1e-3))
        part = connected.recv(count)
        if not part:
            raise ConnectionError("the connection was closed by the other side")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def prove_to_server(connected: socket.socket, secret: bytes) -> wire.Seal:
    """Proves the secret to the side that has accepted the connection.

    Raises:
        ProofError: The other side does not know the secret.
        OSError: The connection has ended, or the other side does not answer.
    """
    challenge = exactly(connected, len(wire.MAGIC) + wire.NONCE_BYTES)
    if not challenge.startswith(wire.MAGIC):
        raise wire.ProofError(explain("The address must be hvkeras's own", "another program listens there",
                                      first_bytes=challenge[:8]))
    theirs, own = challenge[len(wire.MAGIC) :], wire.nonce()
    connected.sendall(own + wire.proof(secret, b"client", theirs, own))
    wire.check_proof(exactly(connected, wire.CODE_BYTES), wire.proof(secret, b"server", theirs, own))
    return wire.Seal(wire.proof(secret, b"session", theirs, own), b"client", b"server")


def prove_to_client(connected: socket.socket, secret: bytes) -> None:
    """Proves the secret to the side that has connected, within `PROOF_DEADLINE`.

    Raises:
        ProofError: The other side does not know the secret.
        OSError: The connection has ended, or the other side does not answer.
    """
    until, own = time.monotonic() + PROOF_DEADLINE, wire.nonce()
    connected.sendall(wire.MAGIC + own)
    answer = exactly(connected, wire.NONCE_BYTES + wire.CODE_BYTES, until)
    theirs, shown = answer[: wire.NONCE_BYTES], answer[wire.NONCE_BYTES :]
    wire.check_proof(shown, wire.proof(secret, b"client", own, theirs))
    connected.sendall(wire.proof(secret, b"server", own, theirs))


def accept_proven(listening: socket.socket, secret: bytes, timeout: float) -> socket.socket:
    """Accepts the first connection whose other side proves the secret; all others are closed.

    Args:
        listening: A listening socket.
        secret: The secret.
        timeout: Seconds to wait.

    Raises:
        PeerError: Nobody has proved it in time.
    """
    proven: queue.Queue[socket.socket] = queue.Queue()
    room = threading.BoundedSemaphore(MAX_UNPROVEN)

    def prove(connected: socket.socket) -> None:
        try:
            prove_to_client(connected, secret)
            proven.put(connected)
        except (OSError, wire.ProofError):
            connected.close()
        finally:
            room.release()

    listening.settimeout(_TICK)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            return proven.get_nowait()
        with contextlib.suppress(TimeoutError):
            connected, _ = listening.accept()
            if room.acquire(blocking=False):
                threading.Thread(target=prove, args=(connected,), name="hvkeras-proof", daemon=True).start()
            else:
                connected.close()
    raise PeerError(explain(f"A peer must connect within {timeout:g} s, and prove the secret",
                            "check the network between the hosts"))
