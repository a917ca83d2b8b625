"""How far this host's clock is from that of the control channel's server, which all ranks count by.

A question and its answer bring the server's time, which this host compares with the middle of its wait: the classic way
of network time protocols (RFC 5905, section 8). Whatever the delays of the two directions, the error is at most half of
the round trip, so of several round trips the shortest counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

QUESTIONS = 8  # of one measurement, each after the answer to the one before
DRIFT = 15e-6  # seconds a second by which two clocks may drift apart, as RFC 5905 has it
KEPT = 32  # answers that are kept, the latest


@dataclass(frozen=True)
class Offset:
    """The way from this host's clock to the server's.

    Attributes:
        seconds: What to add to this host's times.
        uncertainty: By how many seconds that may be wrong.
    """

    seconds: float
    uncertainty: float


@dataclass(frozen=True)
class _Answer:
    at: float
    seconds: float
    half: float  # of the round trip


class Clock:
    """Compares this host's clock with the server's.

    Args:
        host: What tells this host from others (`hvkeras.host.network.host_identity`): on one host there is one clock.
        now: This host's clock, in seconds since the epoch.
    """

    def __init__(self, host: str, now: Callable[[], float] = time.time) -> None:
        self.host = host
        self.now = now
        self._answers: list[_Answer] = []
        self._changed = threading.Condition()
        self._same = False
        self._left = 0

    def begin(self) -> bool:
        """Begins a measurement; returns whether a question is to be sent."""
        with self._changed:
            running, self._left = self._left > 0, QUESTIONS
            return not (running or self._same)

    def hear(self, asked: float, told: float, host: str) -> bool:
        """Learns of an answer; returns whether another question is to be sent.

        Args:
            asked: This host's time when the question left.
            told: The server's time.
            host: The server's host.
        """
        with self._changed:
            now = self.now()
            self._same = host == self.host
            self._answers = [*self._answers, _Answer(now, told - (asked + now) / 2, (now - asked) / 2)][-KEPT:]
            self._left = 0 if self._same else max(0, self._left - 1)
            self._changed.notify_all()
            return self._left > 0

    def wait(self, timeout: float) -> None:
        """Waits until the running measurement is over, for at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, timeout)

    @property
    def offset(self) -> Offset | None:
        """The best that is known now: exactly zero on the server's host, None before the first answer."""
        with self._changed:
            if self._same:
                return Offset(0.0, 0.0)
            now = self.now()
            known = [Offset(answer.seconds, answer.half + DRIFT * abs(now - answer.at)) for answer in self._answers]
            return min(known, key=lambda offset: offset.uncertainty, default=None)
