"""The rank side of exchanges of plain data: an all-gather of one value per rank over the control channel."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hvkeras.control import wire
from hvkeras.control.cause import Cause
from hvkeras.control.connection import Connection, Introduction
from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.host.console import in_words


class Exchange(Connection):
    """A connection over which all ranks exchange values, until the job ends.

    Args:
        connected: A connected socket.
        secret: The job's secret.
        introduction: What this rank reports about itself.

    Raises:
        ProofError: The server does not know the secret.
        UsageError: The server refuses this rank; the message gives the reason.
    """

    def __init__(self, connected: socket.socket, secret: bytes, introduction: Introduction) -> None:
        self.cause: Cause | None = None
        self._changed = threading.Condition()
        self._gathered: dict[str, list[Any]] = {}
        self._missing: dict[str, list[int]] = {}
        self._asking: dict[str, int] = {}  # keys of gathers that wait for others, with their threads
        super().__init__(connected, secret, introduction)

    def in_child(self) -> None:
        """Closes a forked process's copy of the connection, which must close when the rank's own process exits."""
        self._changed = threading.Condition()
        super().in_child()

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
        self._send({"type": "put", "key": key, "value": value})
        with self._changed:
            while key not in self._gathered:
                self.raise_if_ended()
                waited = time.monotonic() - start
                missing = self._missing.get(key, [])
                if waited >= timeout:
                    who = (describe or in_words)(missing) if missing else "the server's answer"
                    raise PeerError(explain(
                        f"All {self.introduction.size} ranks must arrive within {timeout:g} s, but {who} did"
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

    def _take_values(self, message: wire.Message) -> None:
        """Stores gathered values and missing ranks; called with the lock of `_changed` held."""
        if message["type"] == "all":
            self._gathered[message["key"]] = message["values"]
        elif message["type"] == "missing":
            self._missing[message["key"]] = message["ranks"]
