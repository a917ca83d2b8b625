"""Finds and ends the processes of a job by the mark that each of them carries in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil

from harness.launchers import announced_rank

MARK = "HARNESS_JOB"


def marked(mark: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yields every living process that carries the mark, with its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                environ = process.environ()
                if environ.get(MARK) == mark:
                    yield process, environ


def end_marked(mark: str, grace: float = 0.0) -> list[str]:
    """Waits for marked processes to go, and kills those that stay.

    Args:
        mark: The job's mark.
        grace: Seconds to wait.

    Returns:
        The command lines of those that were killed.
    """
    deadline = time.monotonic() + grace
    while (left := [process for process, _ in marked(mark)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = []
    while left:
        for process in left:
            with contextlib.suppress(psutil.Error):
                killed.append(f"pid {process.pid}: {' '.join(process.cmdline())}")
                process.kill()
        psutil.wait_procs(left, timeout=5)
        left = [process for process, _ in marked(mark)]
    return killed


def dump_stacks(mark: str) -> None:
    """Lets every rank print its stacks (and die of it); the launchers live on, and pass the output on."""
    found = list(marked(mark))
    ranks = [process for process, environ in found if announced_rank(environ) is not None]
    for process in ranks or [process for process, _ in found]:
        with contextlib.suppress(psutil.Error):
            if "python" in process.name():
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)
