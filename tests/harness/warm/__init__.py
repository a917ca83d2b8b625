"""Warm ranks: forked from a process that has already imported TensorFlow, Keras and hvkeras.

A cold rank needs two to four CPU seconds for these imports; a warm one starts immediately. The launcher is the real
one, and so are the rank's process, environment, descriptors, folder, host, signals and exit:

    launcher -> stand_in.py (instead of Python) -> parent.py (has imported everything) -> the rank, forked

`stand_in.py` sends its arguments, environment and descriptors to the parent, forwards signals to the rank, and exits
with the rank's status. One difference remains: the rank is not a child of its launcher. Therefore tests of processes,
signals, exits, start-up and installation use `cold=True`. Ranks share no state that matters:

- Each set of variables that modules read at import (`AT_IMPORT`) has its own parents. A parent rejects ranks with
  others.
- Even and odd ranks have different parents. Python chooses their hash seeds, so that sets iterate in different orders,
  as in unrelated processes.
- NumPy's generator is reseeded; Python reseeds its own.
- The environment is visible in `/proc/PID/environ`, where the guards against leaks read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from harness import costs
from harness.warm.variables import ROOM, at_import

FOLDER = "HARNESS_WARM"  # environment variable: the folder of all parents of a test session
switched_off = False  # by `pytest --cold`
_HERE = Path(__file__).parent
_PARITIES = ("even", "odd")
_LIFE = "life"  # a named pipe in that folder, which is open until the session ends
_READY_SECONDS = 120.0  # usually four
_ROOM_BYTES = 32_768


class Session:
    """Parents of one test session, for all its workers. They exit with it, even if it is killed."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        os.mkfifo(self._folder / _LIFE)
        self._life = os.open(self._folder / _LIFE, os.O_RDWR)
        os.environ[FOLDER] = str(self._folder)

    def end(self) -> None:
        """Stop all parents and their ranks."""
        found = _processes()
        os.close(self._life)  # the parents read EOF
        _, left = psutil.wait_procs(found, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        del os.environ[FOLDER]


def python(environment: Mapping[str, str]) -> list[str]:
    """Return the command that replaces Python in a job with warm ranks; start parents if necessary.

    Args:
        environment: The job's environment.

    Raises:
        AssertionError: A parent exited, or took too long to start.
    """
    if switched_off:
        return [sys.executable]
    variables = at_import(environment)
    key = hashlib.sha256(repr(sorted(variables.items())).encode()).hexdigest()[:12]
    folder = Path(os.environ[FOLDER]) / key
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "odd.pid").exists():
            common = {name: environment[name] for name in (costs.FOLDER, "LANG", "PATH", "PYTHONPATH", "TZ")
                      if name in environment}
            for parity in _PARITIES:
                _start(folder, parity, {**common, **variables})
    _wait(folder)
    return [sys.executable, "-I", "-S", str(_HERE / "stand_in.py"), str(folder)]


def is_parent(process: psutil.Process) -> bool:
    """Return whether a process is a parent of warm ranks in this session."""
    return process.pid in {parent.pid for parent in _processes()}


def _start(folder: Path, parity: str, environment: dict[str, str]) -> None:
    command = [sys.executable, str(_HERE / "parent.py"), str(folder / parity)]
    with open(folder / f"{parity}.log", "wb") as log, open(folder.parent / _LIFE, "rb") as life:
        process = subprocess.Popen(command, env={**environment, ROOM: "." * _ROOM_BYTES}, cwd="/", stdin=life,
                                   stdout=log, stderr=log, start_new_session=True)
    (folder / f"{parity}.pid").write_text(str(process.pid))
    process.returncode = 0  # prevents Popen's ResourceWarning about a running child


def _wait(folder: Path) -> None:
    ends = time.monotonic() + _READY_SECONDS
    while not all((folder / parity).exists() for parity in _PARITIES):
        ended = len(_processes(folder)) < len(_PARITIES)
        if ended or time.monotonic() > ends:
            logs = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
            raise AssertionError(f"a parent of warm ranks {'exited' if ended else 'did not become ready'}:\n{logs}")
        time.sleep(0.02)


def _processes(folder: Path | None = None) -> list[psutil.Process]:
    """Return the running parents of a folder, or of all folders."""
    folder = Path(os.environ[FOLDER]) if folder is None else folder
    found = []
    for path in folder.rglob("*.pid"):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(path.read_text()))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
