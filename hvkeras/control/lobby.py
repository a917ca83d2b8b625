"""The lobby of an elastic job: a channel between its launcher and every worker, which outlives changes of the ranks.

A worker is a process, numbered from 0 in the order of starts. It has a rank only as long as the job has the same ranks:
a generation, which has a control channel of its own (`hvkeras.control.server`). Between two generations, workers report
to the lobby that they are ready for the next one, and the launcher answers with their new ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from hvkeras.control import wire
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.connections import Connections, Member
from hvkeras.errors import PeerError
from hvkeras.host.network import keep_alive

CONNECT_WITHIN = 10.0  # seconds of an attempt
FOREVER = 3600.0
ANY_FUNCTION = 2**31  # the index of the elastic function of a worker that has begun none


class Lobby(Connections):
    """The launcher's end.

    Args:
        secret: The job's secret.
        host: The address to listen on.
        on_message: Called, in the lobby's thread, with a worker's number and its message.
        alive: Seconds after which a worker's connection ends whose host does not answer any more.
    """

    def __init__(self, secret: bytes, host: str, on_message: Callable[[int, wire.Message], None],
                 alive: float) -> None:
        super().__init__(64, secret, host, 0, alive)
        self._on_message = on_message

    def send(self, worker: int, message: wire.Message) -> None:
        """Sends a message to a worker, if it is connected; any thread may call this."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send_to, worker, message)

    def _send_to(self, worker: int, message: wire.Message) -> None:
        if worker in self._members:
            self._members[worker].send(message)

    def _admit(self, hello: wire.Message, writer: asyncio.StreamWriter, seal: wire.Seal) -> Member | None:
        member = Member(int(hello["rank"]), str(hello["host"]), int(hello["pid"]), writer, seal, 0.0)
        if member.rank in self._members:
            member.send({"type": "refused", "reason": f"worker {member.rank} is connected already"})
            return None
        self._members[member.rank] = member
        member.send({"type": "welcome"})
        return member

    def _handle(self, member: Member, message: wire.Message) -> None:
        self._on_message(member.rank, message)

    def _lose(self, member: Member) -> None:
        if self._members.get(member.rank) is member:
            del self._members[member.rank]

    async def _watch(self) -> None:
        await asyncio.Event().wait()


class LobbyClient(Connection):
    """A worker's end.

    Args:
        address: Where the lobby listens.
        secret: The job's secret.
        worker: This process's number.
        alive: Seconds after which the connection ends if the launcher's host does not answer any more.

    Raises:
        OSError: The lobby cannot be reached.
        ProofError: Another program listens there.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, worker: int, alive: float) -> None:
        self._changed = threading.Condition()
        self._answer: dict[str, Any] | None = None
        self._changes = self._soon = self._leaves = False
        self._ended = False
        with contextlib.ExitStack() as on_failure:
            connected = on_failure.enter_context(socket.create_connection(address, timeout=CONNECT_WITHIN))
            keep_alive(connected, alive)
            super().__init__(connected, secret, Introduction(worker, 0, socket.gethostname()))
            on_failure.pop_all()
        thread = threading.Thread(target=self._listen, name="hvkeras-lobby", daemon=True)
        self._threads = [thread]
        thread.start()

    def in_child(self) -> None:
        """Closes a forked process's copy of the connection, which must close when the worker's own process exits."""
        self._changed, self._ended = threading.Condition(), True
        super().in_child()

    @property
    def hosts_changed(self) -> bool:
        """Whether workers wait to join, or must leave, at the next commit."""
        return self._changes

    @property
    def must_leave_soon(self) -> bool:
        """Whether workers must leave before the next commit that is due, as their machine is being taken away."""
        return self._soon

    @property
    def must_leave(self) -> bool:
        """Whether this worker must leave at the next commit, as far as that is known."""
        return self._leaves

    def tell(self, message: wire.Message) -> None:
        """Sends a message to the launcher."""
        self._send(message)

    def next_generation(self, commit: int, function: int) -> dict[str, Any]:
        """Reports that this worker is ready for the next generation, and waits for its place there.

        Args:
            commit: The number of the last commit that this worker holds; -1 for none.
            function: The index of the elastic function that it is in, or `ANY_FUNCTION`.

        Returns:
            The launcher's answer: of type `assignment`, with the place in the next generation, or `over`.

        Raises:
            PeerError: The launcher has ended.
        """
        with self._changed:
            self._answer, self._changes, self._soon, self._leaves = None, False, False, False
        self._send({"type": "ready", "commit": commit, "function": function})
        with self._changed:
            while self._answer is None:
                if self._ended:
                    raise PeerError("The job ended: its launcher is gone, or has ended it")
                self._changed.wait(FOREVER)
            return self._answer

    def _listen(self) -> None:
        try:
            while True:
                message = self._read()
                with self._changed:
                    if message["type"] == "changes":
                        self._changes, self._soon = True, self._soon or message["soon"]
                        self._leaves = message["leaves"]
                    elif message["type"] in ("assignment", "over"):
                        self._answer = message
                    self._changed.notify_all()
        except (OSError, wire.ProofError):
            pass
        finally:  # whatever it was: who waits must not wait for ever
            with self._changed:
                self._ended = True
                self._changed.notify_all()
