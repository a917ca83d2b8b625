"""The rank side of exchanges of plain data: an all-gather of one value per rank over the control channel."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from hvkeras.control import wire
from hvkeras.control.cause import Cause
from hvkeras.control.messages import AllValues, Message, MissingRanks, Value
from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.host.console import in_words
from hvkeras.host.forks import detach_in_children
from hvkeras.progress import activity


class Exchange:
    """Exchanges values with all ranks, until the job ends.

    Args:
        size: The number of ranks.
        send: Sends a message to the control server.

    Attributes:
        cause: Why the job has ended early; None as long as it has not.
    """

    def __init__(self, size: int, send: Callable[[Message], None]) -> None:
        self.cause: Cause | None = None
        self._size = size
        self._send = send
        self._changed = threading.Condition()
        self._gathered: dict[str, list[Any]] = {}
        self._missing: dict[str, list[int]] = {}
        self._asking: dict[str, int] = {}  # keys of gathers that wait for others, with their threads
        detach_in_children(self)

    def in_child(self) -> None:
        """Gives a forked process a lock of its own."""
        self._changed = threading.Condition()

    def gather(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None = None,
        describe: Callable[[list[int]], str] | None = None, given_up: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Collects one value from every rank.

        Args:
            key: Identifies the exchange; all ranks pass the same key, and only one exchange per key may run at a time.
            value: Any JSON-serializable value.
            timeout: Seconds to wait for the others.
            on_missing: Called about every second while waiting, with the missing ranks and the seconds waited.
            describe: Formats the missing ranks for the error message; `ranks 1, 3` by default.
            given_up: Called while waiting; returns True once the result is no longer needed.

        Returns:
            The values in rank order; an empty list if the exchange was given up.

        Raises:
            UsageError: The value is too large.
            PeerError: The job ended, or ranks were missing at the deadline; the message names them.
        """
        with self._changed:
            self._asking[key] = threading.get_ident()
        try:
            return self._wait_for_all(key, value, timeout, on_missing, describe, given_up)
        finally:
            with self._changed:
                self._asking.pop(key, None)

    def _wait_for_all(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None,
        describe: Callable[[list[int]], str] | None, given_up: Callable[[], bool] | None,
    ) -> list[Any]:
        if (size := len(json.dumps(value))) > wire.MAX_PAYLOAD:
            raise UsageError(explain(f"A value that ranks exchange must take under {wire.MAX_PAYLOAD} bytes",
                                     "send it as a tensor", key=key, bytes=size))
        start, reported = time.monotonic(), 0.0
        self._send(Value(key, value))
        with self._changed:
            while key not in self._gathered:
                self.raise_if_ended()
                waited = time.monotonic() - start
                missing = self._missing.get(key, [])
                if waited >= timeout:
                    who = (describe or in_words)(missing) if missing else "the server's answer"
                    raise PeerError(explain(
                        f"All {self._size} ranks must arrive within {timeout:g} s, but {who} did"
                        " not", "start the missing ones, check their output, or raise HVKERAS_START_TIMEOUT"))
                if on_missing is not None and waited - reported >= 1.0 and missing:
                    reported = waited
                    on_missing(missing, waited)
                if given_up is not None and given_up():
                    return []
                self._changed.wait(0.1)
            self._missing.pop(key, None)
            return self._gathered.pop(key)

    def wait_for_cause(self, timeout: float) -> Cause | None:
        """Waits until the server reports why the job ends; returns None if it does not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None, timeout)
            return self.cause

    def raise_if_ended(self) -> None:
        """Raises PeerError if the job has ended."""
        if self.cause is not None:
            raise PeerError(f"The job ended: {self.cause.sentence()}")

    @property
    def is_waiting(self) -> bool:
        """Whether any thread waits in an exchange."""
        return bool(self._asking)

    def waiting_in(self) -> list[str]:
        """The exchanges in which this rank waits, and not a thread beside its work, such as one that reads ahead."""
        asking = dict(self._asking)
        if not asking:
            return []
        waits = activity.doing().phase == "input"
        return [key for key, thread in asking.items() if waits or thread == activity.thread()]

    def on_message(self, message: AllValues | MissingRanks) -> None:
        """Stores gathered values and missing ranks."""
        with self._changed:
            if isinstance(message, AllValues):
                self._gathered[message.key] = list(message.values)
            else:
                self._missing[message.key] = list(message.ranks)
            self._changed.notify_all()

    def end(self, cause: Cause) -> bool:
        """Ends all exchanges, since the job has ended; returns False if it had ended before."""
        with self._changed:
            if self.cause is not None:
                return False
            self.cause = cause
            self._changed.notify_all()
            return True
