"""The server side of control-channel connections: peers that prove the job's secret become members."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hvkeras.control import wire
from hvkeras.control.proof import PROOF_DEADLINE
from hvkeras.control.unproven import UnprovenConnections
from hvkeras.errors import MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.forks import detach_in_children
from hvkeras.host.network import keep_alive


@dataclass
class Member:
    """One connected rank."""

    rank: int
    host: str
    pid: int
    writer: asyncio.StreamWriter
    seal: wire.Seal
    seen: float
    attempt: int = 0  # of its process to connect
    arrived: bool = False  # it has sent something after its hello
    left: bool = False
    ended: bool = False
    over: bool = False  # its script has ended, and its process is expected to exit
    failed: bool = False
    outside: str | None = None  # its reported location outside TensorFlow; "" if inside, None without an answer
    doing: str = ""  # what it was doing, as last reported
    values: dict[str, Any] = field(default_factory=dict)

    def send(self, message: wire.Message) -> None:
        """Queues a message; the reading side detects a broken connection."""
        if not self.writer.is_closing():
            self.writer.write(self.seal.close_frames(message))


class Connections(abc.ABC):
    """Listens, admits peers that prove the secret, and passes on members' messages, in a thread of its own.

    Args:
        size: The number of ranks to expect.
        secret: The job's secret, which every rank must prove.
        host: The address to listen on.
        port: The port, or 0 for a free one.
        alive: Seconds after which a peer counts as lost whose host does not answer any more; 0 where heartbeats tell.

    Raises:
        MachineError: The server cannot listen on the address.
    """

    def __init__(self, size: int, secret: bytes, host: str, port: int, alive: float = 0.0) -> None:
        self.size = size
        self._alive = alive
        self._secret = secret
        self._unproven = UnprovenConnections(size)
        self._members: dict[int, Member] = {}
        self._lost: dict[int, Member] = {}
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

    @abc.abstractmethod
    def _admit(self, hello: wire.Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        """Makes a member of a peer that has proved the secret, or refuses it."""

    @abc.abstractmethod
    def _handle(self, member: Member, message: wire.Message) -> None:
        """Handles a message from a member."""

    @abc.abstractmethod
    def _lose(self, member: Member) -> None:
        """Handles the end of a member's connection."""

    def _confirm(self, member: Member) -> None:
        """Handles a member's first message: its process knows that it was admitted."""
        member.arrived = True

    def _on_fault(self, what: str, error: BaseException) -> None:
        """Handles an error that is none of a peer's or of the network.

        Args:
            what: What the server was doing, as the end of a sentence.
            error: The error.
        """
        say(f"a server of hvkeras has failed {what}\n" + "".join(traceback.format_exception(error)))

    @abc.abstractmethod
    async def _watch(self) -> None:
        """Checks the members periodically until it is cancelled."""

    def start(self) -> tuple[str, int]:
        """Starts serving.

        Returns:
            The host and port that ranks connect to.
        """
        self._thread.start()
        return self.address

    def stop(self) -> None:
        """Stops serving, closes the socket and ends the thread."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._request_stop)
            self._thread.join(timeout=5.0)
        elif not self._loop.is_closed():
            self._loop.close()  # it was never started
        self._socket.close()

    @property
    def connected(self) -> frozenset[int]:
        """The ranks that are connected now."""
        return frozenset(self._members)

    @property
    def ever_connected(self) -> frozenset[int]:
        """The ranks that have ever been connected."""
        return self.connected | frozenset(self._lost)

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
            self._stopping.set()

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
        watch = asyncio.ensure_future(self._watch())
        watch.add_done_callback(self._done)
        await self._stopping.wait()
        self._broadcast({"type": "closing"})
        watch.cancel()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        for member in self._members.values():
            member.writer.close()
        await asyncio.gather(watch, *self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        member: Member | None = None
        try:
            seal = await self._prove_in_turn(task, reader, writer)
            hello = await asyncio.wait_for(_read(reader, seal), PROOF_DEADLINE)
            member = self._admit_latest(hello, writer, seal)
            while member is not None:
                self._receive(member, await _read(reader, seal))
        except asyncio.CancelledError:
            pass  # the server is stopping; asyncio would print the cancellation of a connection's task
        except (wire.ProofError, asyncio.TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
            self._on_fault("while a peer connected", error)
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
            seal = await asyncio.wait_for(self._prove(reader, writer), PROOF_DEADLINE)
        except BaseException:
            self._unproven.fails(writer.get_extra_info("peername"))
            raise
        finally:
            self._proving.pop(task, None)
        self._unproven.proves()
        return seal

    def _admit_latest(self, hello: wire.Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        """Admits a peer, unless its process has given up this connection and come again, as this server stood still."""
        first = self._members.get(int(hello["rank"]))
        if first is not None and (first.host, first.pid) == (hello["host"], hello["pid"]):
            if hello["attempt"] < first.attempt:
                return None
            if not first.arrived:
                self._lose(first)
                first.writer.close()
        member = self._admit(hello, writer, seal)
        if member is not None:
            member.attempt = hello["attempt"]
        return member

    def _receive(self, member: Member, message: wire.Message) -> None:
        try:
            if not member.arrived:
                self._confirm(member)
            if message["type"] != "arrived":
                self._handle(member, message)
        except Exception as error:  # noqa: BLE001 - a fault of hvkeras, which nobody else would report
            self._on_fault(f"at a message ({message.get('type')}) of rank {member.rank} on {member.host}", error)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> wire.Seal:
        challenge = wire.nonce()
        writer.write(wire.MAGIC + challenge)
        answer = await reader.readexactly(wire.NONCE_BYTES + wire.CODE_BYTES)
        other, shown = answer[: wire.NONCE_BYTES], answer[wire.NONCE_BYTES :]
        wire.check_proof(shown, wire.proof(self._secret, b"client", challenge, other))
        writer.write(wire.proof(self._secret, b"server", challenge, other))
        return wire.Seal(wire.proof(self._secret, b"session", challenge, other), b"server", b"client")

    def _broadcast(self, message: wire.Message) -> None:
        for member in self._members.values():
            member.send(message)

    def _schedule(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault("beside its connections", error)


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


async def _read(reader: asyncio.StreamReader, seal: wire.Seal) -> wire.Message:
    message = None
    while message is None:
        header = await reader.readexactly(wire.HEADER.size)
        code = await reader.readexactly(wire.CODE_BYTES)
        message = seal.open_frame(header, code, await reader.readexactly(wire.payload_length(header)))
    return message
