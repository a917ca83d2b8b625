"""Coordination of a benchmark's ranks between blocks, over the control channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvkeras.errors import HvkerasError, PeerError
from hvkeras.job.state import Job

LONELY = 20.0  # seconds that a rank which failed waits for the others, which may be stuck in the same collective


class WrongResultError(HvkerasError):
    """An engine computed a wrong result."""


class Ranks:
    """The ranks of the job, as seen by one of them.

    Args:
        job: The running job.
        timeout: Seconds until the benchmark must be over.
    """

    def __init__(self, job: Job, timeout: float) -> None:
        self.job = job
        self.rank, self.size = job.topology.rank, job.topology.size
        self._control = job.control
        self._deadline = time.monotonic() + timeout
        self._exchanges = 0

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Collects a value from every rank, in rank order; ranks that arrive early wait without using the CPU."""
        if self._control is None:
            return [value]
        self._exchanges += 1
        left = max(1.0, self._deadline - time.monotonic())
        return self._control.gather(f"bench {self._exchanges}", value, left if timeout is None else min(timeout, left))

    def together(self, action: Callable[[], Any]) -> tuple[list[Any], str, bool]:
        """Runs an action that may fail on every rank.

        Args:
            action: The action; it returns a value that JSON can represent.

        Returns:
            The values of the ranks, in rank order; why the action failed, on the first rank with a wrong result, else
            on the first one that failed, or ""; and whether that was a wrong result.

        Raises:
            PeerError: The job ended.
        """
        value, reason, wrong, problem = None, "", False, None
        try:
            value = action()
        except Exception as error:  # noqa: BLE001 - any failure of a participant becomes the reason in its row
            reason, wrong, problem = one_line(error), isinstance(error, WrongResultError), error
        try:
            told = self.gather([value, reason, wrong], None if problem is None else LONELY)
        except PeerError:
            if problem is not None:
                raise problem from None  # the others are stuck where this rank failed: end the job with the cause
            raise
        failed = [(rank, said[1], said[2]) for rank, said in enumerate(told) if said[1]]
        if not failed:
            return [said[0] for said in told], "", False
        failed.sort(key=lambda each: not each[2])  # a wrong result is more informative than its consequences
        rank, reason, wrong = failed[0]
        same = len({said for _, said, _ in failed}) == 1 and len(failed) == len(told)
        return [said[0] for said in told], reason if same else f"rank {rank}: {reason}", wrong


def one_line(error: BaseException) -> str:
    """The first line of an error's message, preceded by its class unless it is one of hvkeras's errors."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, HvkerasError) else f"{type(error).__name__}: {lines[0]}"
