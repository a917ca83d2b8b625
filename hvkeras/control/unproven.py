"""Unauthenticated connections to the control channel: limits their number, and reports them."""

from __future__ import annotations

import errno

MAX_CONCURRENT = 64  # in addition to one per rank; each may stay until the deadline of the proof
REPORT_EVERY = 60.0  # seconds between two reports
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class UnprovenConnections:
    """Counts connections that have not proved the job's secret.

    Args:
        size: The number of ranks to expect.
    """

    def __init__(self, size: int) -> None:
        self._limit = MAX_CONCURRENT + size
        self._open = self._count = self._reported = 0
        self._reported_at = float("-inf")
        self._last = ""

    def arrives(self) -> bool:
        """Counts a new connection that has proved nothing yet; returns whether there is room for it as well."""
        self._open += 1
        return self._open <= self._limit

    def proves(self) -> None:
        """Records that one of them has proved the secret."""
        self._open -= 1

    def fails(self, address: object) -> None:
        """Records that one of them has closed, or is about to be closed, without a proof.

        Args:
            address: Its peer address, as the socket reports it.
        """
        self._open -= 1
        self._count += 1
        self._last = str(address[0]) if isinstance(address, tuple) and address else ""

    def is_out_of_room(self, error: object) -> bool:
        """Counts a connection that could not be accepted for lack of resources; returns whether `error` means that."""
        no_room = isinstance(error, OSError) and error.errno in _NO_ROOM
        self._count += no_room
        return no_room

    def report(self, now: float) -> str:
        """The report that is due now, if any.

        Args:
            now: Seconds of a monotonic clock.

        Returns:
            One line; "" if there is nothing new or the last report is too recent.
        """
        if self._count == self._reported or now - self._reported_at < REPORT_EVERY:
            return ""
        self._reported, self._reported_at = self._count, now
        last = f", the last one from {self._last}" if self._last else ""
        return (f"{self._count} connection{'s' * (self._count > 1)} to the control channel did not prove knowledge of"
                f" the job's secret{last}; they were refused")
