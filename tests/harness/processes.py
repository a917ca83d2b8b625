"""Run programs, and find and kill the processes of a job by the mark in their environment."""

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
    """Run a few lines of Python in a process that exits directly after the last line.

    It skips the exit handlers of imported libraries, because TensorFlow's have hung. Tests of exits must start the
    program without this function.

    Args:
        code: The program.
        arguments: Its arguments.
        cwd: Its working folder.
        isolated: Whether to run Python with `-I`, so that it only finds installed modules.
        deadline: Timeout in seconds.

    Returns:
        The completed process; its exit code is 1 if the program raised.
    """
    command = [sys.executable, *(["-I"] if isolated else []), "-c", code + _ENDS, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=deadline)


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process, or an empty text if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def below(pid: int, text: str = "") -> list[psutil.Process]:
    """Return the descendants of a process with a text in their command lines.

    Processes that end while they are listed do not count.
    """
    with contextlib.suppress(psutil.Error):
        return [each for each in psutil.Process(pid).children(recursive=True) if text in command_line(each)]
    return []


def marked(mark: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yield every running process with this mark, and its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                environ = process.environ()
                if environ.get(MARK) == mark:
                    yield process, environ


def end_marked(mark: str, grace: float = 0.0) -> list[str]:
    """Wait for the end of marked processes, and kill the remaining ones.

    Args:
        mark: The job's mark.
        grace: Seconds to wait.

    Returns:
        The pids and command lines of the killed processes.
    """
    deadline = time.monotonic() + grace
    while (left := [process for process, _ in marked(mark)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = []
    while left:
        for process in left:
            with contextlib.suppress(psutil.Error):
                killed.append(f"pid {process.pid}: {command_line(process)}")
                process.kill()
        psutil.wait_procs(left, timeout=5)
        left = [process for process, _ in marked(mark)]
    return killed


def dump_stacks(mark: str) -> None:
    """Abort every rank, which makes it print its stacks. Launchers keep running, and forward the output."""
    found = list(marked(mark))
    ranks = [process for process, environ in found if announced_rank(environ) is not None]
    for process in ranks or [process for process, _ in found]:
        with contextlib.suppress(psutil.Error):
            if "python" in process.name():
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)
