"""Waiting for missing ranks, with a deadline and periodic reports."""

from __future__ import annotations

import time

from hvkeras.errors import PeerError, explain
from hvkeras.host.console import say
from hvkeras.launch_environments import Launch

REPORT_EVERY = 3.0  # seconds between two reports of a missing rank


class Waiting:
    """A deadline that reports, every few seconds, who is being waited for.

    Args:
        timeout: Seconds until `check` raises.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._start = time.monotonic()
        self._reported = 0.0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._timeout - (time.monotonic() - self._start))

    def check(self, whom: str, why: str) -> None:
        """Reports the wait if a report is due.

        Raises:
            PeerError: The deadline has passed.
        """
        waited = time.monotonic() - self._start
        if waited >= self._timeout:
            raise PeerError(explain(f"All ranks must connect within {self._timeout:g} s, but there is no answer from"
                                    f" {whom} ({why})",
                                    "start it, check its output, or raise HVKERAS_START_TIMEOUT"))
        if waited - self._reported >= REPORT_EVERY:
            self._reported = waited
            say(f"waiting for {whom}: {why}, {waited:.0f} s of {self._timeout:g} s")


def task_name(launch: Launch, rank: int) -> str:
    """The name by which users know a rank: `worker 1 (10.0.0.2:2222)` under TF_CONFIG, a pod, or `rank 1`."""
    if rank >= len(launch.tasks):
        return f"rank {rank}"
    return launch.tasks[rank] + (f" ({launch.cluster[rank]})" if launch.cluster else f" (rank {rank})")
