"""The server's view of ranks behind relays: each is an ordinary member that shares its host's connection."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from hvkeras.control.handler import Member, Members
from hvkeras.control.messages import Hello, Message, Relayed, encode

FIRST_RELAY = -1  # members with this number or a lower one are relays, not ranks


def as_runs(ranks: Iterable[int]) -> list[int]:
    """Return ranks as runs: the first and the last of each, in order.

    Example:
        >>> as_runs([0, 1, 2, 5])
        [0, 2, 5, 5]
    """
    runs: list[int] = []
    for rank in sorted(ranks):
        if runs and runs[-1] == rank - 1:
            runs[-1] = rank
        else:
            runs += [rank, rank]
    return runs


def from_runs(runs: Sequence[int]) -> list[int]:
    """Return the ranks in runs from `as_runs`."""
    return [rank for first, last in zip(runs[::2], runs[1::2], strict=True) for rank in range(first, last + 1)]


class Batch:
    """Messages from or for several ranks on one connection, where equal messages are sent once."""

    def __init__(self) -> None:
        # The first message of each rank, the second of each, ...; ranks by message.
        self._rounds: list[dict[bytes | memoryview, list[int]]] = []
        self._counts: dict[int, int] = {}

    def add(self, rank: int, body: bytes | memoryview) -> None:
        """Append an encoded message of a rank."""
        count = self._counts.get(rank, 0)
        self._counts[rank] = count + 1
        if count == len(self._rounds):
            self._rounds.append({})
        self._rounds[count].setdefault(body, []).append(rank)

    def take(self) -> Relayed | None:
        """Remove and return all messages; None if there are none."""
        groups = [(as_runs(ranks), body) for each in self._rounds for body, ranks in each.items()]
        self._rounds, self._counts = [], {}
        return Relayed([runs for runs, _ in groups], [body for _, body in groups]) if groups else None


class Relay:
    """A connected relay and the ranks behind it.

    Attributes:
        ranks: The numbers of the ranks behind it.
    """

    def __init__(self, member: Member, members: Members) -> None:
        self.member = member
        self.ranks: set[int] = set()
        self._members = members
        self._batch = Batch()
        self._is_due = False

    def admit(self, hello: Hello) -> Member:
        """Return a rank behind the relay as a separate member."""
        return Member(hello.number, hello.size, hello.host, hello.pid, hello.attempt,
                      lambda data: self._add(hello.number, data), lambda: None, time.monotonic())

    def broadcast(self, data: bytes) -> None:
        """Send an already encoded `Relayed` message to all ranks, after pending messages."""
        self._flush()
        self.member.write(data)

    def _add(self, rank: int, data: bytes | memoryview) -> None:
        self._batch.add(rank, data)
        if not self._is_due:
            self._is_due = True
            self._members.serving.call_later(0.0, self._flush)  # together with messages sent until then

    def _flush(self) -> None:
        self._is_due = False
        if (message := self._batch.take()) is not None:
            self.member.send(message)


def send_to_all(members: Members, relays: Collection[Relay], message: Message) -> None:
    """Send a message to all ranks: once per directly connected rank, and once per relay."""
    data = encode(message)
    for member in list(members.values()):
        if member.number > FIRST_RELAY:
            member.write(data)
    if relays:
        relayed = encode(Relayed([[]], [data]))
        for relay in relays:
            relay.broadcast(relayed)
