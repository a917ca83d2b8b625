"""Exchanges of plain data: an all-gather of one value per rank over the control channel.

The server gathers the values and sends all of them to all ranks: a star, or a tree of depth two with a relay per host.
For a large value, ranks send the digest first, and the server requests each unknown value from one rank. Equal values,
and equal fields of values, are sent once.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkeras.control import activity, wire
from hvkeras.control.cause import Cause
from hvkeras.control.messages import AllValues, Message, MissingRanks, Value, ValueDigest, ValueWanted
from hvkeras.control.relayed_ranks import as_runs, from_runs
from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.host.console import format_ranks
from hvkeras.host.forks import detach_in_children

LARGE = 512  # bytes; of larger values, the digest is sent first
POLL_INTERVAL, SHORT_POLL_INTERVAL = 0.5, 0.1  # seconds between two checks of callbacks
_DIGEST_BYTES = 16


class Exchange:
    """Exchange of values with all ranks, until the job ends.

    Args:
        send: Sends a message to the control server.

    Attributes:
        cause: The reason why the job has ended early; None while it runs.
    """

    def __init__(self, size: int, send: Callable[[Message], None]) -> None:
        self.cause: Cause | None = None
        self._size = size
        self._send = send
        self._changed = threading.Condition()
        self._gathered: dict[str, list[Any]] = {}
        self._missing: dict[str, list[int]] = {}
        self._values: dict[str, Any] = {}  # of this rank, in incomplete gathers
        self._waiting_threads: dict[str, int] = {}  # waiting threads, by key
        detach_in_children(self)

    def in_child(self) -> None:
        """Create a new lock in a forked process."""
        self._changed = threading.Condition()

    def gather(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None = None,
        describe: Callable[[list[int]], str] | None = None, given_up: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Collect one value from every rank.

        Args:
            key: The identifier of the exchange, equal on all ranks; only one exchange per key may run at a time.
            value: Any JSON-serializable value.
            timeout: Seconds to wait for the others.
            on_missing: Called about every second while waiting, with the missing ranks and the seconds waited.
            describe: Formats the missing ranks for the error message; `ranks 1, 3` by default.
            given_up: Called while waiting; returns True once the result is no longer needed.

        Returns:
            The values in rank order; an empty list if the exchange was given up.

        Raises:
            UsageError: The value is too large.
            PeerError: The job ended, or ranks were missing at the deadline; the message lists them.
        """
        with self._changed:
            self._waiting_threads[key] = threading.get_ident()
        try:
            return self._wait_for_all(key, value, timeout, on_missing, describe, given_up)
        finally:
            with self._changed:
                self._waiting_threads.pop(key, None)

    def _wait_for_all(
        self, key: str, value: Any, timeout: float, on_missing: Callable[[list[int], float], None] | None,
        describe: Callable[[list[int]], str] | None, given_up: Callable[[], bool] | None,
    ) -> list[Any]:
        text = json.dumps(value)
        if len(text) > wire.MAX_PAYLOAD:
            raise UsageError(explain(f"A value that ranks exchange must take under {wire.MAX_PAYLOAD} bytes",
                                     "send it as a tensor", key=key, bytes=len(text)))
        start, reported = time.monotonic(), 0.0
        self._values[key] = value
        self._send(ValueDigest(key, _digest(text)) if len(text) >= LARGE else Value(key, value))
        with self._changed:
            while key not in self._gathered:
                self.raise_if_ended()
                waited = time.monotonic() - start
                missing = self._missing.get(key, [])
                if waited >= timeout:
                    who = (describe or format_ranks)(missing) if missing else "the server's answer"
                    raise PeerError(explain(
                        f"All {self._size} ranks must arrive within {timeout:g} s, but {who} did"
                        " not", "start the missing ones, check their output, or raise HVKERAS_START_TIMEOUT"))
                if on_missing is not None and waited - reported >= 1.0 and missing:
                    reported = waited
                    on_missing(missing, waited)
                if given_up is not None and given_up():
                    return []
                self._changed.wait(min(POLL_INTERVAL if given_up is None else SHORT_POLL_INTERVAL,
                                       max(timeout - waited, 0.0)))
            self._missing.pop(key, None)
            return self._gathered.pop(key)

    def wait_for_cause(self, timeout: float) -> Cause | None:
        """Wait until the server reports why the job ends; return None on timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None, timeout)
            return self.cause

    def raise_if_ended(self) -> None:
        """Raise PeerError if the job has ended."""
        if self.cause is not None:
            raise PeerError(f"The job ended: {self.cause.sentence()}")

    @property
    def is_waiting(self) -> bool:
        """True if any thread waits in an exchange."""
        return bool(self._waiting_threads)

    def waiting_in(self) -> list[str]:
        """Return the exchanges in which this rank waits, without those of background threads (prefetching)."""
        threads = dict(self._waiting_threads)
        if not threads:
            return []
        waits = activity.doing().phase == "input"
        return [key for key, thread in threads.items() if waits or thread == activity.thread()]

    def on_message(self, message: AllValues | MissingRanks | ValueWanted) -> None:
        """Store gathered values and missing ranks, and send a value that the server requests."""
        if isinstance(message, ValueWanted):
            self._send(Value(message.key, self._values.get(message.key)))
            return
        with self._changed:
            if isinstance(message, AllValues):
                self._gathered[message.key] = unpacked(message.values)
                self._values.pop(message.key, None)
            else:
                self._missing[message.key] = from_runs(message.ranks)
            self._changed.notify_all()

    def end(self, cause: Cause) -> bool:
        """End all exchanges, since the job has ended; return False if it had ended before."""
        with self._changed:
            if self.cause is not None:
                return False
            self.cause = cause
            self._changed.notify_all()
            return True


@dataclass
class _Gather:
    """An incomplete exchange: values by rank, or their digests, and values by digest."""

    values: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)


class Gathers:
    """The server side: stores the values until all ranks have sent theirs."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._gathers: dict[str, _Gather] = {}

    def receive(self, rank: int, message: Value | ValueDigest) -> Iterator[ValueWanted | AllValues]:
        """Handle a rank's value, or its digest.

        Yields:
            A request to this rank, or the result for all ranks.
        """
        gather = self._gathers.setdefault(message.key, _Gather())
        if isinstance(message, ValueDigest):
            gather.digests[rank] = message.digest
            if message.digest not in gather.contents and message.digest not in gather.asked:
                gather.asked[message.digest] = rank
                yield ValueWanted(message.key)
        elif rank in gather.digests:
            gather.contents[gather.digests[rank]] = message.value
        else:
            gather.values[rank] = message.value
        if len(gather.values) + len(gather.digests) == self._size and gather.asked.keys() == gather.contents.keys():
            del self._gathers[message.key]
            known = gather.values | {each: gather.contents[digest] for each, digest in gather.digests.items()}
            yield AllValues(message.key, packed([known[each] for each in range(self._size)]))

    def missing(self) -> Iterator[tuple[list[int], MissingRanks]]:
        """Yield, for each exchange, the ranks that have entered it and the missing ones."""
        for key, gather in self._gathers.items():
            arrived = gather.values.keys() | gather.digests.keys()
            yield sorted(arrived), MissingRanks(key, as_runs(set(range(self._size)) - arrived))

    def forget(self, rank: int) -> None:
        """Remove the values of a disconnected rank."""
        for gather in self._gathers.values():
            gather.values.pop(rank, None)
            digest = gather.digests.pop(rank, None)
            if digest is not None and digest not in gather.digests.values():
                gather.asked.pop(digest, None)
                gather.contents.pop(digest, None)


def packed(values: Sequence[Any]) -> dict[str, Any]:
    """Return values as plain data without duplicates, per value and per field of dictionaries.

    Args:
        values: Values that can be written as JSON.
    """
    indices: dict[str, int] = {}
    distinct: list[Any] = []
    runs: list[int] = []  # pairs: an index into the distinct values, and a repeat count
    for value in values:
        text = json.dumps(value)
        index = indices.setdefault(text, len(indices))
        if index == len(distinct):
            distinct.append(value)
        if runs and runs[-2] == index:
            runs[-1] += 1
        else:
            runs += [index, 1]
    first = distinct[0] if distinct else None
    if len(distinct) > 1 and isinstance(first, dict) and all(
            isinstance(each, dict) and list(each) == list(first) for each in distinct):
        return {"runs": runs, "fields": {name: packed([each[name] for each in distinct]) for name in first}}
    return {"runs": runs, "values": distinct}


def unpacked(data: Mapping[str, Any]) -> list[Any]:
    """Return the values from the result of `packed`; equal values are one object."""
    distinct = data.get("values")
    if distinct is None:
        columns = {name: unpacked(column) for name, column in data["fields"].items()}
        distinct = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    runs = data["runs"]
    return [distinct[index] for index, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * _DIGEST_BYTES]
