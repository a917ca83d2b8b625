"""A server of messages: peers that prove the job's secret become members, and a handler decides about all else."""

from __future__ import annotations

import asyncio
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
from hvkeras.control.messages import Closing, Hello, Message, Rejected, Welcome, decode, encode
from hvkeras.errors import MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.forks import detach_in_children
from hvkeras.host.network import keep_alive

FROZEN = 2.0  # a tick later than this means that this process itself was stopped, so no member is late
MAX_CONCURRENT = 64  # in addition to one per rank; each may stay until the deadline of the proof
REPORT_EVERY = 60.0  # seconds between two reports
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class MessageServer:
    """Listens, admits peers that prove the secret, and calls a handler, in a thread of its own.

    Example:
        class Echo(Handler):
            def __init__(self):
                self.members = Members()
            def on_message(self, member, message):
                member.send(message)
        server = MessageServer(Echo(), secret, "127.0.0.1")
        address = server.start()

    Args:
        handler: What decides about the members.
        secret: The secret that every peer must prove.
        host: The address to listen on.
        port: The port, or 0 for a free one.
        size: About how many peers to expect.
        alive: Seconds after which a peer counts as lost whose host does not answer any more; 0 where heartbeats tell.
        on_note: Called, from the server's thread, with one line about unauthenticated connections.

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
        self._unproven = UnprovenConnections(size)
        self._stopping: asyncio.Event | None = None
        self._listening: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._proving: dict[asyncio.Task[None], None] = {}  # connections without proof, the oldest first
        self._writers: set[asyncio.StreamWriter] = set()  # of all connections
        self._socket = _listen(host, port, size)
        self._loop = asyncio.new_event_loop()
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="hvkeras-control-server", daemon=True)
        detach_in_children(self)

    def start(self) -> tuple[str, int]:
        """Starts serving.

        Returns:
            The host and port that peers connect to.
        """
        self._thread.start()
        return self.address

    def stop(self) -> None:
        """Stops serving, closes the socket and ends the thread."""
        if self._thread.is_alive():
            self.call(self._request_stop)
            self._thread.join(timeout=5.0)
        elif not self._loop.is_closed():
            self._loop.close()  # it was never started
        self._socket.close()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the server's thread, unless the server has stopped; any thread may call this."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run_guarded, function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function later; for the handler, in the server's thread."""
        self._loop.call_later(seconds, self._run_guarded, function, *arguments)

    def stop_listening(self) -> None:
        """Closes the listening socket, so that nobody else can join; for the handler, in the server's thread."""
        if self._listening is not None:
            self._listening.close()

    def in_child(self) -> None:
        """Gives up a forked process's copies of the sockets, which must close when this process exits.

        They are replaced, not closed: closing would make asyncio change what the server's own process listens to.
        """
        null = os.open(os.devnull, os.O_RDWR)
        for each in (self._socket, *(writer.get_extra_info("socket") for writer in list(self._writers))):
            if each.fileno() >= 0:
                os.dup2(null, each.fileno(), inheritable=False)
        os.close(null)

    def _request_stop(self) -> None:
        if self._stopping is not None:
            self.is_stopping = True
            self._stopping.set()

    def _run_guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
            self._report_fault("beside its connections", error)

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
        """Counts connections that could not be accepted; asyncio would print a traceback for each."""
        if not self._unproven.is_out_of_room(context.get("exception")):
            loop.default_exception_handler(context)

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        self._listening = server = await asyncio.start_server(self._handle_connection, sock=self._socket)
        ticking = asyncio.ensure_future(self._tick())
        await self._stopping.wait()
        self._members.broadcast(Closing())
        ticking.cancel()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(ticking, *self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _tick(self) -> None:
        last = time.monotonic()
        try:
            while True:
                await asyncio.sleep(TICK)
                now = time.monotonic()
                if now - last > FROZEN:
                    for member in self._members.values():
                        member.seen = now
                last = now
                self._handler.on_tick(now)
                if self._on_note is not None and (report := self._unproven.report(now)):
                    self._on_note(report)
        except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
            self._report_fault("beside its connections", error)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        member: Member | None = None
        try:
            seal = await self._prove_in_turn(task, reader, writer)
            hello = await asyncio.wait_for(_read(reader, seal), wire.PROOF_DEADLINE)
            member = self._admit(hello, writer, seal)
            while member is not None:
                self._receive(member, await _read(reader, seal))
        except asyncio.CancelledError:
            pass  # the server is stopping; asyncio would print the cancellation of a connection's task
        except (wire.ProofError, asyncio.TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
            self._report_fault("while a peer connected", error)
        finally:
            if member is not None:
                self._lose(member)
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()
            self._writers.discard(writer)

    async def _prove_in_turn(self, task: asyncio.Task[None], reader: asyncio.StreamReader,
                             writer: asyncio.StreamWriter) -> wire.Seal:
        """Exchanges proofs with a peer, which takes the place of the oldest without one if there are too many."""
        self._proving[task] = None
        if not self._unproven.arrives():
            oldest = next(iter(self._proving))  # who has the secret proves it at once
            del self._proving[oldest]
            oldest.cancel()
        try:
            if self._alive:
                keep_alive(writer.get_extra_info("socket"), self._alive)
            seal = await asyncio.wait_for(self._prove(reader, writer), wire.PROOF_DEADLINE)
        except BaseException:
            self._unproven.fails(writer.get_extra_info("peername"))
            raise
        finally:
            self._proving.pop(task, None)
        self._unproven.proves()
        return seal

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> wire.Seal:
        challenge = wire.nonce()
        writer.write(wire.MAGIC + challenge)
        answer = await reader.readexactly(wire.NONCE_BYTES + wire.CODE_BYTES)
        other, shown = answer[: wire.NONCE_BYTES], answer[wire.NONCE_BYTES :]
        wire.check_proof(shown, wire.proof(self._secret, b"client", challenge, other))
        writer.write(wire.proof(self._secret, b"server", challenge, other))
        return wire.Seal(wire.proof(self._secret, b"session", challenge, other), b"server", b"client")

    def _admit(self, hello: Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        """Admits a peer, unless its process has given up this connection and come again, as this server stood still."""
        assert isinstance(hello, Hello)

        def send(message: Message) -> None:
            if not writer.is_closing():
                writer.write(seal.close_frames(encode(message)))

        def close() -> None:
            self._lose(member)
            writer.close()

        member = Member(hello.number, hello.size, hello.host, hello.pid, hello.attempt, send, close, time.monotonic())
        first = self._members.get(member.number)
        if first is not None and (first.host, first.pid) == (member.host, member.pid):
            if member.attempt < first.attempt:
                return None
            if not first.arrived:
                first.close()
        if reason := self._handler.on_join(member):
            send(Rejected(reason))
            return None
        self._members.add(member)
        send(Welcome())
        return member

    def _receive(self, member: Member, message: Message) -> None:
        member.seen = time.monotonic()
        member.arrived = True
        try:
            self._handler.on_message(member, message)
        except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
            self._report_fault(f"at a message ({type(message).__name__}) of rank {member.number} on {member.host}",
                               error)

    def _lose(self, member: Member) -> None:
        if self._members.remove(member):
            self._handler.on_leave(member)


class UnprovenConnections:
    """Counts connections that have not proved the job's secret.

    Args:
        size: The number of ranks to expect.
    """

    def __init__(self, size: int) -> None:
        self._limit = MAX_CONCURRENT + size
        self._open = self._count = self._reported = 0
        self._reported_at = float("-inf")
        self._last = ""

    def arrives(self) -> bool:
        """Counts a new connection that has proved nothing yet; returns whether there is room for it as well."""
        self._open += 1
        return self._open <= self._limit

    def proves(self) -> None:
        """Records that one of them has proved the secret."""
        self._open -= 1

    def fails(self, address: object) -> None:
        """Records that one of them has closed, or is about to be closed, without a proof.

        Args:
            address: Its peer address, as the socket reports it.
        """
        self._open -= 1
        self._count += 1
        self._last = str(address[0]) if isinstance(address, tuple) and address else ""

    def is_out_of_room(self, error: object) -> bool:
        """Counts a connection that could not be accepted for lack of resources; returns whether `error` means that."""
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        self._count += no_room
        return no_room

    def report(self, now: float) -> str:
        """The report that is due now, if any.

        Args:
            now: Seconds of a monotonic clock.

        Returns:
            One line; "" if there is nothing new or the last report is too recent.
        """
        if self._count == self._reported or now - self._reported_at < REPORT_EVERY:
            return ""
        self._reported, self._reported_at = self._count, now
        last = f", the last one from {self._last}" if self._last else ""
        return (f"{self._count} connection{'s' * (self._count > 1)} to the control channel did not prove knowledge of"
                f" the job's secret{last}; they were refused")


def _listen(host: str, port: int, size: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(max(size, 16))
    except OSError as error:
        listening.close()
        raise MachineError(explain(f"The control channel must be able to listen on its address ({error.strerror})",
                                   "choose another port or interface, or stop the program that uses it",
                                   address=f"{host}:{port}")) from error
    return listening


async def _read(reader: asyncio.StreamReader, seal: wire.Seal) -> Message:
    data = None
    while data is None:
        header = await reader.readexactly(wire.HEADER.size)
        code = await reader.readexactly(wire.CODE_BYTES)
        data = seal.open_frame(header, code, await reader.readexactly(wire.payload_length(header)))
    return decode(data)
