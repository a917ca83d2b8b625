"""Connections to the control channel that have not proved the job's secret: how many there may be, and what is said."""

from __future__ import annotations

import errno

MOST_AT_ONCE = 64  # besides one for each rank; each may stay for the deadline of the proof
TOLD_EVERY = 60.0  # seconds between two lines
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class UnprovenConnections:
    """Counts them.

    Args:
        size: The number of ranks to expect.
    """

    def __init__(self, size: int) -> None:
        self._most = MOST_AT_ONCE + size
        self._now = self._count = self._told = 0
        self._at = float("-inf")
        self._last = ""

    def arrives(self) -> bool:
        """Counts a connection that has proved nothing yet; says whether there is room for it."""
        self._now += 1
        return self._now <= self._most

    def proves(self) -> None:
        """One of them has proved the secret."""
        self._now -= 1

    def fails(self, address: object) -> None:
        """One of them is gone, or is to go, without a proof.

        Args:
            address: Where it came from, as the socket tells.
        """
        self._now -= 1
        self._count += 1
        self._last = str(address[0]) if isinstance(address, tuple) and address else ""

    def finds_no_room(self, error: object) -> bool:
        """Counts a connection that could not be accepted; says whether that is what an error means."""
        is_it = isinstance(error, OSError) and error.errno in _NO_ROOM
        self._count += is_it
        return is_it

    def line(self, now: float) -> str:
        """What there is to say, once in a while.

        Args:
            now: Seconds of a clock that never goes back.

        Returns:
            One line; "" if there is nothing new, or the last one was a moment ago.
        """
        if self._count == self._told or now - self._at < TOLD_EVERY:
            return ""
        self._told, self._at = self._count, now
        last = f", the last from {self._last}" if self._last else ""
        return (f"{self._count} connection{'s' * (self._count > 1)} to the control channel did not prove the job's"
                f" secret{last}; they get nothing")
