"""What the ranks of a benchmark agree on between two blocks, over the control channel."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvkeras.context import Job
from hvkeras.errors import HvkerasError, PeerError

LONELY = 20.0  # seconds that a rank which failed in a collective waits for the others, which may be stuck in it


class WrongResultError(HvkerasError):
    """An engine computed something else than NumPy."""


class Ranks:
    """The ranks of the job, seen from one of them.

    Args:
        job: The running job.
        timeout: Seconds until the benchmark must be over.
        progress: The file in which rank 0 says how far it is, or None.
    """

    def __init__(self, job: Job, timeout: float, progress: Path | None = None) -> None:
        assert job.control is not None
        self.job = job
        self.rank, self.size = job.topology.rank, job.topology.size
        self._control = job.control
        self._deadline = time.monotonic() + timeout
        self._exchanges = 0
        self._progress = progress if self.rank == 0 else None
        self._told = 0.0

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Collects a value of every rank, in rank order; whoever comes first waits without computing."""
        self._exchanges += 1
        left = max(1.0, self._deadline - time.monotonic())
        return self._control.gather(f"bench {self._exchanges}", value, left if timeout is None else min(timeout, left))

    def together(self, action: Callable[[], Any]) -> tuple[list[Any], str, bool]:
        """Has every rank do something that may fail.

        Args:
            action: What to do; it returns what JSON can carry.

        Returns:
            What the ranks returned, in rank order; why it failed on the first rank where it did, or ""; and
            whether that was a wrong result.

        Raises:
            PeerError: The job ended.
        """
        value, reason, wrong, problem = None, "", False, None
        try:
            value = action()
        except Exception as error:  # noqa: BLE001 - whatever a contestant dies of is the reason in its row
            reason, wrong, problem = one_line(error), isinstance(error, WrongResultError), error
        try:
            told = self.gather([value, reason, wrong], None if problem is None else LONELY)
        except PeerError:
            if problem is not None:
                raise problem from None  # the others are stuck where this one failed: the job ends with the cause
            raise
        failed = [(rank, said[1], said[2]) for rank, said in enumerate(told) if said[1]]
        if not failed:
            return [said[0] for said in told], "", False
        failed.sort(key=lambda each: not each[2])  # a wrong result says more than what followed from it
        rank, reason, wrong = failed[0]
        same = len({said for _, said, _ in failed}) == 1 and len(failed) == len(told)
        return [said[0] for said in told], reason if same else f"rank {rank}: {reason}", wrong

    def show(self, share: float, what: str) -> None:
        """Tells the launcher how far the benchmark is.

        Args:
            share: What is done, from 0 to 1.
            what: What is being done.
        """
        if self._progress is None or (time.monotonic() - self._told < 0.1 and share < 1):
            return
        self._told = time.monotonic()
        new = self._progress.with_suffix(".new")
        with contextlib.suppress(OSError):  # a bar that stands still is no reason to fail
            new.write_text(f"{share:.4f} {what}")
            os.replace(new, self._progress)


def one_line(error: BaseException) -> str:
    """An error's class, unless it is one of ours, and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, HvkerasError) else f"{type(error).__name__}: {lines[0]}"
