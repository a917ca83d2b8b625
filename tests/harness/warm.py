"""Warm ranks: forked from a process that has already imported TensorFlow, Keras and hvkeras.

A cold rank needs two to four CPU seconds for these imports; a warm one starts immediately, from a fork server of the
product (`hvkeras.launcher.shared_fork_server`), which all jobs of a test session share. The launcher is the real one.
One difference remains: the rank is not a child of its launcher, but of the fork server. Therefore tests of processes,
signals, exits, start-up and installation use `cold=True`. Ranks share no state that matters:

- Each set of variables that imports read (`_AT_IMPORT`) has its own servers.
- Even and odd ranks have different servers. Python chooses their hash seeds, so that sets iterate in different orders,
  as in unrelated processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from harness import costs
from hvkeras.launcher import preloading, shared_fork_server

FOLDER = "HARNESS_WARM"  # environment variable: the folder of all servers of a test session
switched_off = False  # by `pytest --cold`
# The usual imports of ranks, without MPI and Horovod, which the oldest environment does not have.
_MODULES = ("numpy", "hvkeras", "tensorflow", "hvkeras.tensorflow", "hvkeras.keras", "hvkeras.callbacks",
            "hvkeras.training.fit_run", "hvkeras.data", "tensorflow.python.framework.function_def_to_graph",
            "harness.checks")
_PARITIES = ("even", "odd")
_LIFE = "life"  # a named pipe in that folder, which is open until the session ends
_READY_SECONDS = 120.0  # usually four
_AT_IMPORT = re.compile("|".join(f"({pattern.pattern})" for pattern in (
    preloading.AT_START, preloading.BY_LIBRARIES, preloading.BY_TENSORFLOW)) + "|KERAS_(?!DISTRIBUTION_)|"
    "(HOME|HVKERAS_LOG_LEVEL|MALLOC_.*)$")


class Session:
    """Fork servers of one test session, for all its workers. They exit with it, even if it is killed."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        os.mkfifo(self._folder / _LIFE)
        self._life = os.open(self._folder / _LIFE, os.O_RDWR)
        os.environ[FOLDER] = str(self._folder)

    def end(self) -> None:
        """Stop all servers and their ranks."""
        found = _processes()
        os.close(self._life)  # the servers read EOF
        _, left = psutil.wait_procs(found, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        del os.environ[FOLDER]


def python(environment: Mapping[str, str]) -> list[str]:
    """Return the command that replaces Python in a job with warm ranks; start fork servers if necessary.

    Args:
        environment: The job's environment.

    Raises:
        AssertionError: A server exited, or took too long to start.
    """
    if switched_off:
        return [sys.executable]
    variables = {name: value for name, value in environment.items()
                 if _AT_IMPORT.match(name) and (name, value) != ("TF_USE_LEGACY_KERAS", "0")}
    key = hashlib.sha256(repr(sorted(variables.items())).encode()).hexdigest()[:12]
    folder = Path(os.environ[FOLDER]) / key
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "odd.pid").exists():
            common = {name: environment[name] for name in (costs.FOLDER, "LANG", "PATH", "TZ") if name in environment}
            modules = (*_MODULES, "tf_keras" if variables.get("TF_USE_LEGACY_KERAS") == "1" else "keras")
            for parity in _PARITIES:
                with open(folder.parent / _LIFE, "rb") as life:
                    process = shared_fork_server.start(folder / parity, [sys.executable], modules,
                                                       {**common, **variables}, life.fileno())
                (folder / f"{parity}.new").write_text(str(process.pid))  # others read it at any time
                (folder / f"{parity}.new").rename(folder / f"{parity}.pid")
                process.returncode = 0  # prevents Popen's ResourceWarning about a running child
    _wait(folder)
    return [*shared_fork_server.stand_in([folder / parity for parity in _PARITIES], _READY_SECONDS),
            sys.executable]


def is_server(process: psutil.Process) -> bool:
    """Return whether a process is a fork server of this session."""
    return process.pid in {server.pid for server in _processes()}


def _wait(folder: Path) -> None:
    ends = time.monotonic() + _READY_SECONDS
    while not all((folder / parity).exists() for parity in _PARITIES):
        ended = len(_processes(folder)) < len(_PARITIES)
        if ended or time.monotonic() > ends:
            logs = "\n".join(log.read_text(errors="replace") for log in folder.glob("*.log"))
            raise AssertionError(f"a fork server {'exited' if ended else 'did not become ready'}:\n{logs}")
        time.sleep(0.02)


def _processes(folder: Path | None = None) -> list[psutil.Process]:
    """Return the running servers of a folder, or of all folders."""
    folder = Path(os.environ[FOLDER]) if folder is None else folder
    found = []
    for path in folder.rglob("*.pid"):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(path.read_text()))
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
