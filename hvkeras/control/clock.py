"""Offset of this host's clock from the control server's clock, which is the reference for all ranks.

Each request returns the server's time, which this host compares with the midpoint of its wait. This is the classic
method of network time protocols (RFC 5905, section 8). Whatever the delays in the two directions, the error is at most
half the round-trip time, so the shortest of several round trips is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

QUESTIONS = 8  # requests per measurement; each is sent after the answer to the previous one
DRIFT = 15e-6  # seconds per second by which two clocks may drift apart, as in RFC 5905
MAX_ANSWERS = 32  # the number of stored answers


@dataclass(frozen=True)
class Offset:
    """Offset from this host's clock to the server's.

    Attributes:
        seconds: Seconds to add to this host's times.
        uncertainty: The largest possible error of `seconds`, in seconds.
    """

    seconds: float
    uncertainty: float


@dataclass(frozen=True)
class _Answer:
    at: float
    seconds: float
    half_round_trip: float  # half the round-trip time, in seconds


class Clock:
    """Comparison of this host's clock with the server's.

    Args:
        host: This host's identity (`hvkeras.host.network.host_identity`); processes on one host share one clock.
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
        """Start a measurement; return whether a request must be sent."""
        with self._changed:
            running, self._left = self._left > 0, QUESTIONS
            return not (running or self._same)

    def receive_answer(self, asked: float, answered: float, host: str) -> bool:
        """Process an answer; return whether another request must be sent.

        Args:
            asked: This host's time when the request was sent.
            host: The identity of the server's host.
        """
        with self._changed:
            now = self.now()
            self._same = host == self.host
            answer = _Answer(now, answered - (asked + now) / 2, (now - asked) / 2)
            self._answers = [*self._answers, answer][-MAX_ANSWERS:]
            self._left = 0 if self._same else max(0, self._left - 1)
            self._changed.notify_all()
            return self._left > 0

    def wait(self, timeout: float) -> None:
        """Wait until the running measurement is done, for at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, timeout)

    @property
    def offset(self) -> Offset | None:
        """The best current estimate: exactly zero on the server's host, None before the first answer."""
        with self._changed:
            if self._same:
                return Offset(0.0, 0.0)
            now = self.now()
            known = [Offset(answer.seconds, answer.half_round_trip + DRIFT * abs(now - answer.at))
                     for answer in self._answers]
            return min(known, key=lambda offset: offset.uncertainty, default=None)
