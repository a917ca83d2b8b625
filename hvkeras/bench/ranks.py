"""Coordination of a benchmark's ranks between blocks, over the control channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvkeras.errors import HvkerasError, PeerError, summary
from hvkeras.job.session import Session

FAILED_GATHER_TIMEOUT = 20.0  # seconds that a failed rank waits for the others, which may be stuck


class WrongResultError(HvkerasError):
    """An engine computed a wrong result."""


class BenchmarkRanks:
    """Ranks of the job, as seen by one of them.

    Args:
        timeout: Seconds until the benchmark must complete.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self.session = session
        self.rank, self.size = session.topology.rank, session.topology.size
        self._control = session.control
        self._deadline = time.monotonic() + timeout
        self._exchanges = 0

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Gather a value from every rank, in rank order; ranks that arrive early wait without using the CPU."""
        if self._control is None:
            return [value]
        self._exchanges += 1
        left = max(1.0, self._deadline - time.monotonic())
        return self._control.gather(f"bench {self._exchanges}", value, left if timeout is None else min(timeout, left))

    def run_on_all(self, action: Callable[[], Any]) -> tuple[list[Any], str, bool]:
        """Run an action that may fail on every rank.

        Args:
            action: The action, which returns a JSON-compatible value.

        Returns:
            - The values of the ranks, in rank order.
            - The reason of a failure, or "": of the first rank with a wrong result, else of the first one that failed.
            - Whether the failure is a wrong result.

        Raises:
            PeerError: The job has failed.
        """
        value, reason, wrong, problem = None, "", False, None
        try:
            value = action()
        except Exception as error:  # noqa: BLE001 - any failure of a participant becomes the reason in its row
            reason, wrong, problem = one_line(error), isinstance(error, WrongResultError), error
        try:
            gathered = self.gather([value, reason, wrong], None if problem is None else FAILED_GATHER_TIMEOUT)
        except PeerError:
            if problem is not None:
                raise problem from None  # the other ranks are stuck, since this one failed: end the job with the cause
            raise
        failed = [(rank, answer[1], answer[2]) for rank, answer in enumerate(gathered) if answer[1]]
        if not failed:
            return [answer[0] for answer in gathered], "", False
        failed.sort(key=lambda each: not each[2])  # a wrong result is more informative than its consequences
        rank, reason, wrong = failed[0]
        same = len({answer for _, answer, _ in failed}) == 1 and len(failed) == len(gathered)
        return [answer[0] for answer in gathered], reason if same else f"rank {rank}: {reason}", wrong


def one_line(error: BaseException) -> str:
    """Return an error as one line, with its class if it is not an error of hvkeras."""
    if isinstance(error, HvkerasError):
        return (str(error).strip().splitlines() or [""])[0]
    name, colon, reason = summary(error).partition(": ")
    return f"{name.rpartition('.')[2]}{colon}{reason}"
