"""Warm ranks: forked from a process that has imported TensorFlow, Keras and hvkeras already.

A rank of its own needs two to four seconds of a core for these imports; a warm one is there at once. The launcher
is the real one, and so are the rank's process, environment, descriptors, folder, host, signals and end:

    launcher -> stand_in.py (in Python's place) -> parent.py (which has imported everything) -> the rank, forked

`stand_in.py` hands over what the launcher gave it, passes signals on, and ends as the rank ends. What this does not
preserve: the rank is no child of its launcher, so tests about processes, signals, exits, start-up and
installation take `cold=True`. What must not be shared is not:

- Variables that count at import (`AT_IMPORT`) get a parent each; a rank that asks for others is refused.
- Ranks with even and with odd numbers have parents of their own: Python picks their hash seeds, so that sets iterate in
  unlike orders, as in unrelated processes.
- NumPy's generator is seeded anew, and Python's is by Python.
- The environment shows in `/proc/PID/environ`, where the guards against leaks look for it.
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

FOLDER = "HARNESS_WARM"  # the variable that names the folder of all parents of a test session
switched_off = False  # by `pytest --cold`
_HERE = Path(__file__).parent
_PLACES = ("even", "odd")
_LIFE = "life"  # a pipe in that folder, held open for as long as the session lives
_READY_SECONDS = 120.0  # it takes four
_ROOM_BYTES = 32_768


class Session:
    """The parents of one test session, of all its workers; they end with it, however it ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        os.mkfifo(self._folder / _LIFE)
        self._life = os.open(self._folder / _LIFE, os.O_RDWR)
        os.environ[FOLDER] = str(self._folder)

    def end(self) -> None:
        """Ends all parents, and with them their ranks."""
        found = _processes()
        os.close(self._life)  # the parents read the pipe's end
        _, left = psutil.wait_procs(found, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        del os.environ[FOLDER]


def python(environment: Mapping[str, str]) -> list[str]:
    """What stands in Python's place on the command line of a job with warm ranks; starts parents if need be.

    Args:
        environment: The job's environment.

    Raises:
        AssertionError: A parent ended, or took too long.
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
            kept = {name: environment[name] for name in (costs.FOLDER, "LANG", "PATH", "PYTHONPATH", "TZ")
                    if name in environment}
            for index in _PLACES:
                _start(folder, index, {**kept, **variables})
    _wait(folder)
    return [sys.executable, "-I", "-S", str(_HERE / "stand_in.py"), str(folder)]


def is_parent(process: psutil.Process) -> bool:
    """Whether a process is a parent of warm ranks, of any worker of this session."""
    return process.pid in {parent.pid for parent in _processes()}


def _start(folder: Path, index: str, environment: dict[str, str]) -> None:
    command = [sys.executable, str(_HERE / "parent.py"), str(folder / index)]
    with open(folder / f"{index}.log", "wb") as log, open(folder.parent / _LIFE, "rb") as life:
        process = subprocess.Popen(command, env={**environment, ROOM: "." * _ROOM_BYTES}, cwd="/", stdin=life,
                                   stdout=log, stderr=log, start_new_session=True)
    (folder / f"{index}.pid").write_text(str(process.pid))
    process.returncode = 0  # nobody waits for it; without this, Popen would complain


def _wait(folder: Path) -> None:
    ends = time.monotonic() + _READY_SECONDS
    while not all((folder / index).exists() for index in _PLACES):
        ended = len(_processes(folder)) < len(_PLACES)
        if ended or time.monotonic() > ends:
            said = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
            raise AssertionError(f"a parent of warm ranks {'ended' if ended else 'never was ready'}:\n{said}")
        time.sleep(0.02)


def _processes(folder: Path | None = None) -> list[psutil.Process]:
    """The living parents of a folder, or of all."""
    folder = Path(os.environ[FOLDER]) if folder is None else folder
    found = []
    for path in folder.rglob("*.pid"):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(path.read_text()))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
