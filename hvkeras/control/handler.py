"""What a server of messages calls: a handler, which decides about the members."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hvkeras.control.messages import Message, decode, encode

TICK = 0.25  # seconds between two calls of a handler's `on_tick`


@dataclass(eq=False)
class Member:
    """One connected peer.

    Attributes:
        number: Its rank, or the number of a worker or a host.
        size: The size that it has introduced itself with.
        host: Its host.
        pid: Its process.
        attempt: Of its process to connect.
        write: Queues an encoded message for it; the reading side detects a broken connection.
        close: Gives up the connection; it is no member any more.
        seen: When it last gave a sign of life, in seconds of a monotonic clock.
        arrived: Whether it knows that it was admitted.
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
    """What a server does for its handler, in its own thread."""

    is_stopping: bool

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function later; never after the server has stopped."""

    def stop_listening(self) -> None:
        """Close the listening socket, so that nobody else can join."""


class Members(Mapping[int, Member]):
    """The connected members by number, as a handler sees them; only their server adds and removes any."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._serving: Serving | None = None

    def __getitem__(self, number: int) -> Member:
        """Return a member by its number."""
        return self._members[number]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of those that are there now; any thread may."""
        return iter(list(self._members))

    def __len__(self) -> int:
        """Return how many there are."""
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
        """Add a member, in the place of one with the same number."""
        self._members[member.number] = member

    def remove(self, member: Member) -> bool:
        """Remove a member; returns False if another has taken its place."""
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
    """Decides about the members of a server; called in the server's thread.

    A class that derives from this one needs only the methods for what it does not ignore.

    Attributes:
        members: The members, with what the server can do for its handler.
    """

    members: Members

    def on_join(self, _member: Member, /) -> str | None:
        """Handle a peer that has proved the secret; it is sent nothing before its first message, `Arrived`.

        Returns:
            Why it is rejected; "" if it becomes a member; None if it does once the handler sends it `Welcome`.
        """
        return ""

    def on_data(self, member: Member, data: bytes) -> None:
        """Handle an encoded message from a member, whose connection ends if it is none."""
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
        """Handle the end of a member's connection; it is no member any more."""
        return

    def on_tick(self, _now: float, /) -> None:
        """Check whatever time decides; called every `TICK` seconds with the time of a monotonic clock."""
        return

    def on_frozen(self, now: float) -> None:
        """Handle that this process itself was stopped, so that no member is late."""
        for member in self.members.values():
            member.seen = now

    def on_fault(self, _what: str, _error: BaseException, /) -> None:
        """Handle an error that is none of a peer's or of the network, and that has been printed.

        Args:
            _what: What the server was doing, as the end of a sentence.
            _error: The error.
        """
        return
