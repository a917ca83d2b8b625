"""A message server: authenticates peers, admits them as members, and passes their messages to a handler."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from hvkeras.control import wire
from hvkeras.control.handler import TICK, Handler, Member
from hvkeras.control.messages import Closing, Hello, Rejected, Welcome, decode, name_of
from hvkeras.errors import MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.forks import detach_in_children
from hvkeras.host.network import keep_alive

FROZEN = 2.0  # a tick later than this means that this process was stopped, so no member is late
MAX_CONCURRENT = 64  # unauthenticated connections, in addition to one per rank
MIN_BACKLOG = 128  # connections waiting to be accepted
_WRITE_CHUNK = 256 * 1024  # bytes of a large message passed to the transport at once
_READ_CHUNK = 64 * 1024  # bytes read at once after a failed write
REPORT_EVERY = 60.0  # seconds between two reports
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class MessageServer:
    """A server that listens, authenticates and admits peers, and calls a handler in its own thread.

    Example:
        class Echo(Handler):
            def __init__(self):
                self.members = Members()
            def on_message(self, member, message):
                member.send(message)
        server = MessageServer(Echo(), secret, "127.0.0.1")
        address = server.start()

    Args:
        handler: The callbacks that decide about the members.
        secret: The secret with which every peer must authenticate.
        host: The address to listen on; the name of an abstract Unix socket if it begins with a null character.
        port: The port, or 0 for a free one.
        size: The approximate number of peers to expect.
        alive: Seconds without an answer from a peer's host after which the peer counts as lost; 0 if heartbeats detect
            that.
        on_note: Called from the server's thread with one line about unauthenticated connections.

    Raises:
        MachineError: The server cannot listen on the address.
    """

    def __init__(self, handler: Handler, secret: bytes, host: str, port: int = 0, size: int = 64, alive: float = 0.0,
                 on_note: Callable[[str], None] | None = None) -> None:
        self.is_stopping: bool = False
        self._handler = handler
        self._members = handler.members
        self._members.attach(self)
        self._alive = alive
        self._secret = secret
        self._on_note = on_note
        self._unauthenticated = UnauthenticatedConnections(size)
        self._stopping: asyncio.Event | None = None
        self._listening: asyncio.Server | None = None
        self._peers: set[_Peer] = set()
        self._pending: dict[_Peer, int] = {}  # not yet members, the oldest first: their deadlines in ticks
        self._ticks = 0
        self._backlog = max(size, MIN_BACKLOG)  # with a full backlog, the kernel drops connections
        self._socket = _listen(host, port, self._backlog)
        self._loop = asyncio.new_event_loop()
        self.address: tuple[str, int] = (host, 0) if host.startswith("\0") else self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="hvkeras-control-server", daemon=True)
        detach_in_children(self)

    def start(self) -> tuple[str, int]:
        """Start serving.

        Returns:
            The host and port that peers connect to.
        """
        self._thread.start()
        return self.address

    def stop(self) -> None:
        """Stop serving, close the socket and end the thread."""
        if self._thread.is_alive():
            self.call(self._request_stop)
            self._thread.join(timeout=5.0)
        elif not self._loop.is_closed():
            self._loop.close()  # never started
        self._socket.close()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the server's thread, unless the server has stopped; callable from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run_guarded, function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay; for the handler, in the server's thread."""
        self._loop.call_later(seconds, self._run_guarded, function, *arguments)

    def stop_listening(self) -> None:
        """Close the listening socket, so that nobody else can join; for the handler, in the server's thread."""
        if self._listening is not None:
            self._listening.close()

    def in_child(self) -> None:
        """Release a forked process's copies of the sockets, so that they close when this process exits.

        They are replaced, not closed: closing would make asyncio change the parent's polling set.
        """
        null = os.open(os.devnull, os.O_RDWR)
        for each in (self._socket, *(peer.socket for peer in list(self._peers))):
            if each is not None and each.fileno() >= 0:
                os.dup2(null, each.fileno(), inheritable=False)
        os.close(null)

    def _request_stop(self) -> None:
        if self._stopping is not None:
            self.is_stopping = True
            self._stopping.set()

    def _run_guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - an internal error, not reported elsewhere
            self._report_fault("in a callback", error)

    def _report_fault(self, what: str, error: BaseException) -> None:
        say(f"a server of hvkeras has failed {what}\n" + "".join(traceback.format_exception(error)))
        self._handler.on_fault(what, error)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._on_loop_error)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count connections that could not be accepted; asyncio would print a traceback for each."""
        if not self._unauthenticated.is_out_of_resources(context.get("exception")):
            loop.default_exception_handler(context)

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._listening = server = await self._loop.create_server(lambda: _Peer(self), sock=self._socket,
                                                                    backlog=self._backlog)
        ticking = asyncio.ensure_future(self._tick())
        await self._stopping.wait()
        self._members.broadcast(Closing())
        ticking.cancel()
        server.close()
        for peer in list(self._peers):
            peer.close()
        await asyncio.gather(ticking, return_exceptions=True)
        await asyncio.sleep(0)  # lets the connections close

    async def _tick(self) -> None:
        last = time.monotonic()
        try:
            while True:
                await asyncio.sleep(TICK)
                now = time.monotonic()
                if now - last > FROZEN:
                    self._handler.on_frozen(now)
                last = now
                self._handler.on_tick(now)
                self._close_late_peers()
                if self._on_note is not None and (report := self._unauthenticated.report(now)):
                    self._on_note(report)
        except Exception as error:  # noqa: BLE001 - an internal error, not reported elsewhere
            self._report_fault("in a callback", error)

    # Connections of peers.

    def on_connect(self, peer: _Peer, transport: asyncio.Transport) -> None:
        """Register a new connection; if there are too many, it replaces the oldest unauthenticated one."""
        self._peers.add(peer)
        if self._alive:
            keep_alive(transport.get_extra_info("socket"), self._alive)
        if not self._unauthenticated.opened():
            next(iter(self._pending)).close()  # a peer with the secret authenticates immediately
        self._pending[peer] = self._ticks + int(wire.AUTHENTICATION_DEADLINE / TICK)

    def on_authenticated(self, peer: _Peer) -> None:
        """Restart the deadline of an authenticated peer, which must now introduce itself."""
        self._unauthenticated.authenticated()
        del self._pending[peer]
        self._pending[peer] = self._ticks + int(wire.AUTHENTICATION_DEADLINE / TICK)

    def on_disconnect(self, peer: _Peer) -> None:
        """Handle the end of a connection."""
        self._peers.discard(peer)
        if self._pending.pop(peer, None) is not None and not peer.is_authenticated:
            self._unauthenticated.failed(peer.address)
        if peer.member is not None:
            self._lose(peer.member)

    def _close_late_peers(self) -> None:
        """Close connections past their deadline, in ticks, not seconds: a busy server must not fail its peers."""
        self._ticks += 1
        for peer, until in list(self._pending.items()):
            if until > self._ticks:
                return
            peer.close()

    def admit(self, peer: _Peer, data: bytes) -> Member | None:
        """Admit a peer, unless its process has already replaced this connection while the server was stopped."""
        hello = decode(data)
        assert isinstance(hello, Hello)
        self._pending.pop(peer, None)

        def close() -> None:
            self._lose(member)
            peer.close()

        member = Member(hello.number, hello.size, hello.host, hello.pid, hello.attempt, peer.write, close,
                        time.monotonic())
        first = self._members.get(member.number)
        if first is not None and (first.host, first.pid) == (member.host, member.pid):
            if member.attempt < first.attempt:
                return None
            if not first.arrived:
                first.close()
        reason = self._handler.on_join(member)
        if reason:
            member.send(Rejected(reason))
            return None
        self._members.add(member)
        if reason is not None:
            member.send(Welcome())
        return member

    def receive(self, member: Member, data: bytes) -> None:
        """Handle a message from a member."""
        member.seen = time.monotonic()
        member.arrived = True
        try:
            self._handler.on_data(member, data)
        except Exception as error:  # noqa: BLE001 - an internal error, not reported elsewhere
            self._report_fault(f"at a message ({name_of(data)}) of rank {member.number} on {member.host}", error)

    def report_fault(self, error: BaseException) -> None:
        """Report an internal error in the handling of a peer's connection."""
        self._report_fault("while a peer connected", error)

    @property
    def secret(self) -> bytes:
        """The secret with which every peer must authenticate."""
        return self._secret

    def _lose(self, member: Member) -> None:
        if self._members.remove(member):
            self._handler.on_leave(member)


class _Peer(asyncio.Protocol):
    """One connection: first authentication, then the introduction, then messages.

    Attributes:
        address: Its peer address, as the socket reports it.
    """

    def __init__(self, server: MessageServer) -> None:
        self.member: Member | None = None
        self.is_authenticated: bool = False
        self.address: object = None
        self._server = server
        self._challenge = wire.nonce()
        self._seal: wire.Seal | None = None
        self._received = bytearray()
        self._frame = 0  # bytes of the current frame, including its header
        self._unsent: collections.deque[bytes | memoryview] = collections.deque()
        self._is_paused = False  # the transport's buffer is full
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.address = transport, transport.get_extra_info("peername")
        self._server.on_connect(self, transport)
        transport.write(wire.MAGIC + self._challenge)

    def data_received(self, data: bytes) -> None:
        """Buffer the received bytes, and handle complete messages."""
        self._received += data
        try:
            if not self.is_authenticated:
                self._authenticate()
            while self._transport is not None and (message := self._next()) is not None:
                if self.member is not None:
                    self._server.receive(self.member, message)
                else:
                    self.member = self._server.admit(self, message)
                    if self.member is None:
                        self.close()
        except wire.AuthenticationError:
            self.close()
        except Exception as error:  # noqa: BLE001 - an internal error, not reported elsewhere
            self._server.report_fault(error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._receive_rest()
        self._transport = None
        self._server.on_disconnect(self)

    def _receive_rest(self) -> None:
        """Receive what the peer sent before a write to it failed: its last message may say that it leaves normally."""
        with contextlib.suppress(OSError):
            while self._transport is not None and (data := os.read(self.socket.fileno(), _READ_CHUNK)):
                self.data_received(data)

    def write(self, data: bytes | memoryview) -> None:
        """Send an encoded message, unless the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            assert self._seal is not None
            self._unsent += self._seal.close_frames(data)
            self._send()

    def pause_writing(self) -> None:
        """Buffer further writes here: asyncio would copy the data for each connection."""
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._transport is not None:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        while self._unsent and not self._is_paused:
            piece = self._unsent.popleft()
            if len(piece) > _WRITE_CHUNK:
                self._unsent.appendleft(piece[_WRITE_CHUNK:])
            self._transport.write(piece[:_WRITE_CHUNK])

    def close(self) -> None:
        """Close the connection after sending pending data; nothing more is received."""
        if self._transport is not None:
            self._transport.writelines(self._unsent)
            self._unsent.clear()
            self._transport.close()
            self._transport = None

    @property
    def socket(self) -> Any:
        """The connection's socket; None once it is closed."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    def _authenticate(self) -> None:
        """Verify the peer's authentication code, and send the server's."""
        if len(self._received) < wire.NONCE_BYTES + wire.CODE_BYTES:
            return
        other, code = self._consume(wire.NONCE_BYTES), self._consume(wire.CODE_BYTES)
        secret, challenge = self._server.secret, self._challenge
        wire.verify_code(code, wire.authentication_code(secret, b"client", challenge, other))
        assert self._transport is not None
        self._transport.write(wire.authentication_code(secret, b"server", challenge, other))
        key = wire.session_key(self.socket, secret, challenge, other)
        self._seal = wire.Seal(key, b"server", b"client")
        self.is_authenticated = True
        self._server.on_authenticated(self)

    def _next(self) -> bytes | None:
        prefix = wire.HEADER.size + wire.CODE_BYTES
        while self._seal is not None and len(self._received) >= prefix:
            self._frame = self._frame or prefix + wire.payload_length(bytes(self._received[: wire.HEADER.size]))
            if len(self._received) < self._frame:
                return None
            header, code = self._consume(wire.HEADER.size), self._consume(wire.CODE_BYTES)
            payload, self._frame = self._consume(self._frame - prefix), 0
            if (message := self._seal.open_frame(header, code, payload)) is not None:
                return bytes(message)
        return None

    def _consume(self, count: int) -> bytes:
        consumed = bytes(self._received[:count])
        del self._received[:count]
        return consumed


class UnauthenticatedConnections:
    """Counters of connections that have not authenticated.

    Args:
        size: The number of ranks to expect.
    """

    def __init__(self, size: int) -> None:
        self._limit = MAX_CONCURRENT + size
        self._open = self._count = self._reported = 0
        self._reported_at = float("-inf")
        self._last = ""

    def opened(self) -> bool:
        """Count a new unauthenticated connection; return whether it is within the limit."""
        self._open += 1
        return self._open <= self._limit

    def authenticated(self) -> None:
        """Record that a connection has authenticated."""
        self._open -= 1

    def failed(self, address: object) -> None:
        """Record that a connection has closed, or is about to be closed, without authenticating.

        Args:
            address: Its peer address, as the socket reports it.
        """
        self._open -= 1
        self._count += 1
        self._last = str(address[0]) if isinstance(address, tuple) and address else ""

    def is_out_of_resources(self, error: object) -> bool:
        """Return whether `error` means a lack of resources to accept a connection, and count that connection."""
        no_resources = isinstance(error, OSError) and error.errno in _NO_RESOURCES
        self._count += no_resources
        return no_resources

    def report(self, now: float) -> str:
        """Return the report that is due now, if any.

        Args:
            now: Seconds of a monotonic clock.

        Returns:
            One line; "" if there is nothing new or the last report is too recent.
        """
        if self._count == self._reported or now - self._reported_at < REPORT_EVERY:
            return ""
        self._reported, self._reported_at = self._count, now
        last = f", the last one from {self._last}" if self._last else ""
        return (f"{self._count} connection{'s' * (self._count > 1)} to the control channel did not authenticate with"
                f" the job's secret{last}; they were refused")


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    is_local = host.startswith("\0")
    family = socket.AF_UNIX if is_local else socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(host if is_local else (host, port))
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        raise MachineError(explain(f"The control channel must be able to listen on its address ({error.strerror})",
                                   "choose another port or interface, or stop the program that uses it,"
                                   " such as another process of this rank",
                                   address=f"{host}:{port}")) from error
    return listening
