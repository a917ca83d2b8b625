"""The handler interface of a message server: callbacks that decide about the members."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hvkeras.control.messages import Message, decode, encode

TICK = 0.25  # seconds between two calls of a handler's `on_tick`


@dataclass(eq=False)
class Member:
    """A connected peer.

    Attributes:
        number: Its rank, or the number of a worker or a host.
        attempt: The number of its process's attempt to connect.
        write: Queues an encoded message for it; the reading side detects a broken connection.
        close: Closes the connection and removes the member.
        seen: The time of its last message, in seconds of a monotonic clock.
        arrived: True once it has confirmed that it was admitted.
    """

    number: int
    size: int
    host: str
    pid: int
    attempt: int
    write: Callable[[bytes | memoryview], None]
    close: Callable[[], None]
    seen: float
    arrived: bool = False

    def send(self, message: Message) -> None:
        """Queue a message for it."""
        self.write(encode(message))


class Serving(Protocol):
    """The functions that a server provides for its handler, in its own thread."""

    is_stopping: bool

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a delay; never after the server has stopped."""

    def stop_listening(self) -> None:
        """Close the listening socket, so that nobody else can join."""


class Members(Mapping[int, Member]):
    """The connected members by number; only their server adds and removes any."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._serving: Serving | None = None

    def __getitem__(self, number: int) -> Member:
        """Return a member by its number."""
        return self._members[number]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the present members; callable from any thread."""
        return iter(list(self._members))

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def attach(self, serving: Serving) -> None:
        """Set the server."""
        self._serving = serving

    @property
    def serving(self) -> Serving:
        """The server."""
        assert self._serving is not None
        return self._serving

    def add(self, member: Member) -> None:
        """Add a member; it replaces one with the same number."""
        self._members[member.number] = member

    def remove(self, member: Member) -> bool:
        """Remove a member; return False if another has replaced it."""
        is_there = self._members.get(member.number) is member
        if is_there:
            del self._members[member.number]
        return is_there

    def broadcast(self, message: Message) -> None:
        """Send a message to all."""
        data = encode(message)
        for member in list(self._members.values()):
            member.write(data)


class Handler(Protocol):
    """Callbacks that decide about the members of a server; called in the server's thread.

    Derived classes override only the methods that they need.

    Attributes:
        members: The members, and the functions of the server.
    """

    members: Members

    def on_join(self, _member: Member, /) -> str | None:
        """Handle an authenticated peer; it receives nothing before its first message, `Arrived`.

        Returns:
            The reason for a rejection; "" to admit the peer; None to admit it once the handler sends `Welcome`.
        """
        return ""

    def on_data(self, member: Member, data: bytes) -> None:
        """Handle an encoded message from a member; an invalid one closes the connection."""
        try:
            message = decode(data)
        except ValueError:
            member.close()
            raise
        self.on_message(member, message)

    def on_message(self, _member: Member, _message: Message, /) -> None:
        """Handle a message from a member."""
        return

    def on_leave(self, _member: Member, /) -> None:
        """Handle the end of a member's connection; it is no longer a member."""
        return

    def on_tick(self, _now: float, /) -> None:
        """Run time-dependent checks; called every `TICK` seconds with the time of a monotonic clock."""
        return

    def on_frozen(self, now: float) -> None:
        """Handle a stop of this process itself, for which no member is late."""
        for member in self.members.values():
            member.seen = now

    def on_fault(self, _what: str, _error: BaseException, /) -> None:
        """Handle an internal error that has been printed.

        Args:
            _what: The activity of the server, as the end of a sentence.
        """
        return
