"""Runs programs, and finds and ends the processes of a job by the mark that each of them carries in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from harness.launchers import announced_rank

MARK = "HARNESS_JOB"
_ENDS = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"


def run_python(code: str, *arguments: str, cwd: Path, isolated: bool = False,
               deadline: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Runs a few lines of Python, whose process ends after the last of them.

    The libraries that it imported have no say in that: TensorFlow's own exit has taken forever. Whoever tests an exit
    starts the program by itself.

    Args:
        code: The program.
        arguments: Its arguments.
        cwd: Its working folder.
        isolated: Whether Python looks for modules among the installed ones alone (`-I`).
        deadline: Seconds in which it must end.

    Returns:
        What it printed; the exit code is 1 if it raised.
    """
    command = [sys.executable, *(["-I"] if isolated else []), "-c", code + _ENDS, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=deadline)


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
