"""Exchanges arrays between ranks over MPI: each rank sends its arrays to all others, in one thread, by key."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Arrays = list[np.ndarray[Any, Any]]
Done = Callable[[list[Arrays], str], None]  # called with the arrays of each rank, or with why there are none

_IDLE = 0.0002  # seconds between two looks for messages while nothing arrives


class Exchange:
    """The thread that sends and receives.

    Nothing is negotiated: a message carries the key of its collective, and waits at its destination until that rank
    asks for this key. MPI keeps the order of two messages from the same sender, so that the second message of a key
    belongs to its second run.

    Args:
        communicator: An `mpi4py.MPI.Comm` of all ranks, which only this thread uses.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._asked: queue.SimpleQueue[tuple[str, tuple[int, ...], Arrays, Done]] = queue.SimpleQueue()
        self._arrived: dict[tuple[str, int], collections.deque[Arrays]] = collections.defaultdict(collections.deque)
        self._waiting: dict[str, collections.deque[tuple[tuple[int, ...], Done]]] = collections.defaultdict(
            collections.deque)
        self._sends: list[Any] = []
        self._failure = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvkeras-mpi4py", daemon=True)
        self._thread.start()

    def ask(self, key: str, ranks: Sequence[int], arrays: Arrays, done: Done) -> None:
        """Sends arrays to the other ranks, and hands on what they send under the same key; returns at once.

        Args:
            key: The collective's key.
            ranks: The ranks that take part, this one among them.
            arrays: What this rank sends.
            done: Called in the thread of this class with each rank's arrays, in the order of `ranks`, and ""; or with
                nothing and the reason, once the engine is aborted.
        """
        self._asked.put((key, tuple(ranks), arrays, done))

    def abort(self, reason: str) -> None:
        """Fails all exchanges in flight and all later ones."""
        self._failure = reason

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._failure != ""

    def stop(self) -> None:
        """Ends the thread, when everything that was sent has been received."""
        self._over.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not (self._over.is_set() and not self._sends and self._asked.empty()):
            if not (self._take() | self._receive()):
                time.sleep(_IDLE)
            self._sends = [send for send in self._sends if not send.Test()]
            if self._failure:
                self._fail()

    def _take(self) -> bool:
        """Begins what was asked for."""
        began = False
        while not self._asked.empty():
            key, ranks, arrays, done = self._asked.get()
            if not self._failure:
                others = [rank for rank in ranks if rank != self._rank]
                self._sends += [self._communicator.isend((key, arrays), other) for other in others]
            self._arrived[key, self._rank].append(arrays)
            self._waiting[key].append((ranks, done))
            self._complete(key)
            began = True
        return began

    def _receive(self) -> bool:
        """Takes one message, if there is one."""
        from mpi4py import MPI

        status = MPI.Status()
        message = None if self._failure else self._communicator.improbe(status=status)
        if message is None:
            return False
        key, arrays = message.recv()
        self._arrived[key, status.Get_source()].append(arrays)
        self._complete(key)
        return True

    def _complete(self, key: str) -> None:
        """Ends the oldest exchange of a key for which all ranks' arrays are there."""
        while self._waiting[key] and all(self._arrived[key, rank] for rank in self._waiting[key][0][0]):
            ranks, done = self._waiting[key].popleft()
            done([self._arrived[key, rank].popleft() for rank in ranks], "")

    def _fail(self) -> None:
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft()[1]([], self._failure)
        self._sends = []
