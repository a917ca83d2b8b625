"""Membership channel of an elastic job, between its launcher and every worker; it outlives membership changes.

A worker is a process, numbered from 0 in the order of starts. It has a rank only within a generation, which has a
separate control channel (`hvkeras.control.server`). Between two generations, workers report to the launcher that they
are ready for the next one, and it answers with their new ranks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from hvkeras.control import wire
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.handler import Handler, Member, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import Arrived, Assignment, ChangeAhead, FunctionDone, Message, Ready
from hvkeras.errors import PeerError
from hvkeras.host.forks import detach_in_children
from hvkeras.host.network import keep_alive

CONNECT_WITHIN = 10.0  # seconds
FOREVER = 3600.0
ANY_FUNCTION = 2**31  # the function index of a worker that has entered none


class WorkersHandler(Handler):
    """Handler that admits each worker once, and forwards its messages.

    Args:
        on_message: Called with a worker's number and its message.
    """

    def __init__(self, on_message: Callable[[int, Message], None]) -> None:
        self.members = Members()
        self._on_message = on_message

    def on_join(self, member: Member) -> str:
        """Admit a worker, unless its number is already in use."""
        return f"worker {member.number} is connected already" if member.number in self.members else ""

    def on_message(self, member: Member, message: Message) -> None:
        """Forward a message."""
        if not isinstance(message, Arrived):
            self._on_message(member.number, message)

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker, if it is connected."""
        if worker in self.members:
            self.members[worker].send(message)


class MembershipServer:
    """The launcher's end.

    Args:
        on_message: Called from the server's thread with a worker's number and its message.
        alive: Seconds without an answer from a worker's host after which the connection ends.
    """

    def __init__(self, secret: bytes, host: str, on_message: Callable[[int, Message], None], alive: float) -> None:
        self._handler = WorkersHandler(on_message)
        self._server = MessageServer(self._handler, secret, host, alive=alive)
        self.address: tuple[str, int] = self._server.address

    def start(self) -> tuple[str, int]:
        """Start serving; return the address that workers connect to."""
        return self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    @property
    def connected(self) -> frozenset[int]:
        """The workers that are connected now."""
        return frozenset(self._handler.members)

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker, if it is connected; callable from any thread."""
        self._server.call(self._handler.send, worker, message)


class MembershipClient:
    """A worker's end.

    Args:
        alive: Seconds without an answer from the launcher's host after which the connection ends.

    Raises:
        OSError: The launcher cannot be reached.
        AuthenticationError: Another program listens at the address.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, worker: int, alive: float) -> None:
        self._changed = threading.Condition()
        self._answer: Assignment | FunctionDone | None = None
        self._changes = self._soon = self._leaves = False
        self._ended = False
        with contextlib.ExitStack() as on_failure:
            connected = on_failure.enter_context(socket.create_connection(address, timeout=CONNECT_WITHIN))
            keep_alive(connected, alive)
            self._connection = Connection(connected, secret, Introduction(worker, 0, socket.gethostname()))
            on_failure.pop_all()
        detach_in_children(self)
        self._connection.start(threading.Thread(target=self._listen, name="hvkeras-membership", daemon=True))

    def in_child(self) -> None:
        """Mark the channel as ended in a forked process, whose connection has been closed."""
        self._changed, self._ended = threading.Condition(), True

    def close(self) -> None:
        """Close the connection; waiting threads then raise."""
        self._connection.close()

    @property
    def hosts_changed(self) -> bool:
        """True if workers wait to join, or must leave, at the next commit."""
        return self._changes

    @property
    def must_leave_soon(self) -> bool:
        """True if workers must leave before the next regular commit, as their machine is being preempted."""
        return self._soon

    @property
    def must_leave(self) -> bool:
        """True if this worker must leave at the next commit, as far as is known."""
        return self._leaves

    def send(self, message: Message) -> None:
        """Send a message to the launcher."""
        self._connection.send(message)

    def next_generation(self, commit: int, function: int) -> Assignment | None:
        """Report that this worker is ready for the next generation, and wait for its assignment.

        Args:
            commit: The number of this worker's last commit; -1 for none.
            function: The index of its elastic function, or `ANY_FUNCTION`.

        Returns:
            The assignment; None if the job has finished this function.

        Raises:
            PeerError: The launcher has ended.
        """
        with self._changed:
            self._answer, self._changes, self._soon, self._leaves = None, False, False, False
        self._connection.send(Ready(commit, function))
        with self._changed:
            while self._answer is None:
                if self._ended:
                    raise PeerError("The job ended: its launcher is gone, or has ended it")
                self._changed.wait(FOREVER)
            return self._answer if isinstance(self._answer, Assignment) else None

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.read()
                with self._changed:
                    match message:
                        case ChangeAhead():
                            self._changes, self._soon = True, self._soon or message.soon
                            self._leaves = message.leaves
                        case Assignment() | FunctionDone():
                            self._answer = message
                    self._changed.notify_all()
        except (OSError, wire.AuthenticationError):
            pass
        finally:  # for any exception: waiting threads must not wait forever
            with self._changed:
                self._ended = True
                self._changed.notify_all()
