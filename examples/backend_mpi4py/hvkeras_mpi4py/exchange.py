"""Exchange of arrays between ranks over MPI, in one thread: each rank sends its arrays to all others."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Arrays = list[np.ndarray[Any, Any]]
Done = Callable[[list[Arrays], str], None]  # receives the arrays of each rank and "", or [] and the reason of a failure

_POLL_INTERVAL = 0.0002  # seconds between two polls while nothing arrives


class Exchange:
    """Thread that sends and receives arrays.

    Ranks do not negotiate. A message carries the key of its collective, and is queued at its destination until that
    rank submits the same key. MPI delivers messages from one sender in order, so the second message with a key belongs
    to the second run of that collective.

    Args:
        communicator: An `mpi4py.MPI.Comm` of all ranks. No other thread may use it.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._submitted: queue.SimpleQueue[tuple[str, tuple[int, ...], Arrays, Done]] = queue.SimpleQueue()
        self._received: dict[tuple[str, int], collections.deque[Arrays]] = collections.defaultdict(collections.deque)
        self._pending: dict[str, collections.deque[tuple[tuple[int, ...], Done]]] = collections.defaultdict(
            collections.deque)
        self._sends: list[Any] = []
        self._failure = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvkeras-mpi4py", daemon=True)
        self._thread.start()

    def submit(self, key: str, ranks: Sequence[int], arrays: Arrays, done: Done) -> None:
        """Send arrays to the other ranks and receive theirs, without blocking.

        Args:
            key: The collective's key.
            ranks: The participating ranks, including this one.
            arrays: The arrays of this rank.
            done: Callback, called in the thread of this class. It receives the arrays of each rank in the order of
                `ranks`, and ""; after `abort`, an empty list and the reason.
        """
        self._submitted.put((key, tuple(ranks), arrays, done))

    def abort(self, reason: str) -> None:
        """Fail all pending exchanges and all later ones."""
        self._failure = reason

    @property
    def is_aborted(self) -> bool:
        """True after `abort`."""
        return self._failure != ""

    def stop(self) -> None:
        """Stop the thread after all sends have completed."""
        self._stopping.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not (self._stopping.is_set() and not self._sends and self._submitted.empty()):
            if not (self._send() | self._receive()):
                time.sleep(_POLL_INTERVAL)
            self._sends = [send for send in self._sends if not send.Test()]
            if self._failure:
                self._fail_pending()

    def _send(self) -> bool:
        any_sent = False
        while not self._submitted.empty():
            key, ranks, arrays, done = self._submitted.get()
            if not self._failure:
                others = [rank for rank in ranks if rank != self._rank]
                self._sends += [self._communicator.isend((key, arrays), other) for other in others]
            self._received[key, self._rank].append(arrays)
            self._pending[key].append((ranks, done))
            self._complete(key)
            any_sent = True
        return any_sent

    def _receive(self) -> bool:
        from mpi4py import MPI

        status = MPI.Status()
        message = None if self._failure else self._communicator.improbe(status=status)
        if message is None:
            return False
        key, arrays = message.recv()
        self._received[key, status.Get_source()].append(arrays)
        self._complete(key)
        return True

    def _complete(self, key: str) -> None:
        """Complete the exchanges of a key, oldest first, for which the arrays of all ranks are present."""
        while self._pending[key] and all(self._received[key, rank] for rank in self._pending[key][0][0]):
            ranks, done = self._pending[key].popleft()
            done([self._received[key, rank].popleft() for rank in ranks], "")

    def _fail_pending(self) -> None:
        for pending in self._pending.values():
            while pending:
                pending.popleft()[1]([], self._failure)
        self._sends = []
