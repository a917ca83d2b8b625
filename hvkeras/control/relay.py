"""Relay of one host: a process between its ranks and the control server, to which it has one connection.

Towards the server, it combines the ranks' messages: equal messages are sent once, heartbeats once a second, and
everything else immediately. Towards the ranks, it forwards their messages. It decodes only a few message types. A rank
authenticates to the relay, and the relay to the server.

The relay is a separate process because the Python of a rank may be blocked, and a rank may leave the job before others.
It listens on an abstract Unix socket, whose name is derived from the job's secret and the server's address, so nothing
has to be announced or removed. The rank that first binds a second such name starts the relay. If that rank ends, the
kernel frees the name, and another rank takes over.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvkeras.control.cause import ENDED, silent_for
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.handler import Handler, Member, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import (
    Closing,
    Hello,
    Message,
    RankGone,
    Relayed,
    ServerLost,
    SomeJoined,
    decode,
    encode,
    name_of,
)
from hvkeras.control.relayed_ranks import FIRST_RELAY, Batch, from_runs
from hvkeras.control.wire import AuthenticationError
from hvkeras.errors import HvkerasError, summary

STARTED_WITHIN = 30.0  # seconds
_CODE = ("import sys; sys.path[:] = {path!r}\n"
         "from hvkeras.control.relay import main; main()")


def relay_name(server: tuple[str, int], secret: bytes) -> str:
    """Return the socket name of this host's relay to a server."""
    label = f"{os.getuid()} relay {server[0]} {server[1]}"
    return f"\0hvkeras-{hmac.new(secret, label.encode(), hashlib.sha256).hexdigest()[:32]}"


def connect_to_relay(name: str, timeout: float) -> socket.socket:
    """Connect to a relay.

    Raises:
        OSError: There is none, or it does not accept the connection in time.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout)
        connected.connect(name)
    except BaseException:
        connected.close()
        raise
    return connected


@contextlib.contextmanager
def relay_lock(name: str) -> Iterator[None]:
    """Ensure that only this rank of its host starts the relay.

    Args:
        name: The name of the relay's socket.

    Raises:
        OSError: Another rank is starting it.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"{name}-starter")
        yield


def start_relay(name: str, server: socket.socket, secret: bytes, size: int, liveness: float) -> str:
    """Start the relay of this host.

    Args:
        server: A new connection to the server, which the relay inherits.
        size: The number of ranks of the job.
        liveness: Seconds without a message from the server after which it counts as lost.

    Returns:
        "" once it listens; else the reason why it does not.
    """
    path = [str(Path(__file__).parents[2]), *sys.path]
    arguments = {"name": name, "server": server.fileno(), "secret": secret.hex(), "size": size, "liveness": liveness}
    try:
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", _CODE.format(path=path)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd="/",
                              pass_fds=[server.fileno()]) as starter:
            output = starter.communicate(json.dumps(arguments).encode(),
                                         STARTED_WITHIN)[0].decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if output == READY else (output.splitlines() or ["it ended without output"])[-1]


READY = "ready"


BEAT = 1.0  # seconds between two heartbeats to the server
LINGER = 5.0  # seconds for which a relay without ranks waits for others
_MAX_NUMBER = 2**62  # range of random numbers, so that two relays of a job differ


class RelayHandler(Handler):
    """Handler that forwards messages between the ranks of a host and the server.

    Args:
        liveness: Seconds without a message from the server after which it counts as lost.

    Attributes:
        send: Sends a message to the server.
        done: Set once the relay is no longer needed.
    """

    def __init__(self, liveness: float) -> None:
        self.members = Members()
        self.done: threading.Event = threading.Event()
        self.send: Callable[[Message], None] = lambda _: None
        self._liveness = liveness
        self._batch = Batch()
        self._is_due = False
        self._admitted: set[int] = set()  # the ranks that the server has admitted
        self._some_joined = False  # some rank has joined, so heartbeats are urgent
        self._is_ending = False  # the server is lost, or the job has ended: no more ranks connect
        self._detached = False  # the server has shut down normally
        self._next_beat = 0.0
        self._received_at = self._empty_since = time.monotonic()

    # From the ranks to the server.

    def on_join(self, member: Member) -> None:
        """Introduce a rank to the server, which answers it."""
        self._add(member, encode(Hello(member.number, member.size, member.host, member.pid, member.attempt)))

    def on_data(self, member: Member, data: bytes) -> None:
        """Batch a rank's message with others already received; heartbeats wait for the relay's next heartbeat."""
        if name_of(data) == "Heartbeat" and not self._some_joined:
            self._batch.add(member.number, data)
        else:
            self._add(member, data)

    def on_leave(self, member: Member) -> None:
        """Report the end of a rank's connection."""
        self._admitted.discard(member.number)
        self._add(member, encode(RankGone()))
        self._empty_since = time.monotonic()

    def _add(self, member: Member, data: bytes) -> None:
        self._batch.add(member.number, data)
        if not self._is_due:
            self._is_due = True
            self.members.serving.call_later(0.0, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if (message := self._batch.take()) is not None:
            self.send(message)
        if self._is_ending and not self.members:
            self.done.set()

    # From the server to the ranks.

    def on_server_message(self, message: Message) -> None:
        """Forward a message from the server."""
        self._received_at = time.monotonic()
        if isinstance(message, Closing):
            self._detached = True
            self.members.broadcast(message)
        elif isinstance(message, Relayed):
            for runs, body in zip(message.ranks, message.bodies, strict=True):
                match name_of(body):
                    case "JobEnded":
                        self._is_ending = True
                    case "SomeJoined":
                        joined = decode(body)
                        self._some_joined = isinstance(joined, SomeJoined) and joined.joined
                    case "Welcome":
                        self._admitted.update(from_runs(runs))
                for number in from_runs(runs) if runs else sorted(self._admitted):
                    if number in self.members:
                        self.members[number].write(body)

    def on_server_lost(self, silent: bool) -> None:
        """Notify the ranks that the server is lost."""
        if not self._is_ending and not self._detached:
            self.members.broadcast(ServerLost(silent, silent_for(self._liveness) if silent else ENDED))
        self._is_ending = True
        self._flush()

    # Time-dependent checks.

    def on_tick(self, now: float) -> None:
        """Send a heartbeat to the server, and detect missing ones from it."""
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self._flush_or_beat()
        if now - self._received_at > self._liveness and not self._all_ranks_silent(now):
            self.on_server_lost(silent=True)
        if not self.members and now - self._empty_since > LINGER:
            self.done.set()

    def on_frozen(self, now: float) -> None:
        """Restart the server's liveness timeout as well."""
        super().on_frozen(now)
        self._received_at = now

    def _flush_or_beat(self) -> None:
        self.send(self._batch.take() or Relayed([], []))

    def _all_ranks_silent(self, now: float) -> bool:
        """Return whether the ranks are silent as well, as when a user suspends the whole job."""
        return all(now - member.seen > self._liveness / 2 for member in self.members.values())

    def on_fault(self, _what: str, _error: BaseException, /) -> None:
        """Exit because of an internal error, which ends the job."""
        os._exit(1)


def relay(name: str, connected: socket.socket, secret: bytes, size: int, liveness: float) -> None:
    """Serve the ranks of this host until none is left.

    Args:
        name: The name of the socket to listen on.
        connected: A new connection to the server.
        size: The number of ranks of the job.
        liveness: Seconds without a message from the server after which it counts as lost.

    Raises:
        HvkerasError: There is already another relay, or the server rejects this one.
        OSError: The server is lost.
    """
    handler = RelayHandler(liveness)
    serving = MessageServer(handler, secret, name, size=size)  # raises if there is another relay
    connected.settimeout(STARTED_WITHIN)
    number = FIRST_RELAY - secrets.randbelow(_MAX_NUMBER)
    try:
        server = Connection(connected, secret, Introduction(number, size, socket.gethostname()))
    except BaseException:
        serving.stop()
        raise
    handler.send = server.send
    serving.start()
    _notify_starter(READY)
    reading = threading.Thread(target=_read, args=(server, serving, handler), name="hvkeras-relay-read", daemon=True)
    reading.start()
    handler.done.wait()
    serving.stop()
    server.close()


def _read(server: Connection, serving: MessageServer, handler: RelayHandler) -> None:
    try:
        while True:
            serving.call(handler.on_server_message, decode(server.receive()))
    except (OSError, AuthenticationError, ValueError):
        serving.call(handler.on_server_lost, False)


def _notify_starter(text: str) -> None:
    """Send the result to the starter, which then stops waiting, and detach from its pipes."""
    sys.stdout.write(text)
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def main() -> None:
    """Run the relay as a daemon: the rank that starts it may end before others of its host."""
    arguments = json.loads(sys.stdin.read())
    if os.fork():
        os._exit(0)
    try:
        relay(arguments["name"], socket.socket(fileno=arguments["server"]), bytes.fromhex(arguments["secret"]),
              arguments["size"], arguments["liveness"])
    except (OSError, HvkerasError) as error:
        _notify_starter(summary(error))
