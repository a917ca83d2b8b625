"""Simulated members and server, without sockets, for tests of handlers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvkeras.control.handler import Handler, Member
from hvkeras.control.messages import Arrived, Message, decode


class Serving:
    """Simulated server of a handler, with a clock that only `pass_time` advances."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.listens = True
        self._calls: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self._now = 0.0

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        self._calls.append((self._now + seconds, function, arguments))

    def stop_listening(self) -> None:
        self.listens = False

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        for call in sorted((call for call in self._calls if call[0] <= self._now), key=lambda call: call[0]):
            self._calls.remove(call)
            call[1](*call[2])


class Channel:
    """A handler with simulated members."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.serving = handler, Serving()
        handler.members.attach(self.serving)
        self.sent: dict[int, list[Message]] = {}  # by member
        self.rejected = ""

    def join(self, number: int, size: int = 2, host: str = "", pid: int = 0, arrives: bool = True) -> Member:
        """Connect a member, unless the handler rejects it."""
        sent: list[Message] = []
        member = Member(number, size, host or f"host{number}", pid or 10 + number, 0,
                        lambda data: sent.append(decode(data)), lambda: self.leave(member), time.monotonic())
        self.rejected = self.handler.on_join(member) or ""
        if not self.rejected:
            self.sent[number] = sent
            self.handler.members.add(member)
            if arrives:
                self.tell(member, Arrived())
        return member

    def tell(self, member: Member, *messages: Message) -> None:
        """Send messages from a member to the handler."""
        for message in messages:
            member.arrived = True
            self.handler.on_message(member, message)

    def leave(self, member: Member) -> None:
        """Close a member's connection."""
        if self.handler.members.remove(member):
            self.handler.on_leave(member)
