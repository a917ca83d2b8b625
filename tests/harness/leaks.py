"""What a test must not leave behind: environment variables, threads, child processes, files, shared memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from harness import warm

Item = TypeVar("Item")

_GRACE_SECONDS = 3.0
_SHARED_MEMORY = Path("/dev/shm")

# Set once by a third party, on import or first use, for the rest of the process.
_THIRD_PARTY_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",  # pytest itself, per phase of a test
        "TF2_BEHAVIOR",  # import tensorflow
        "ENABLE_RUNTIME_UPTIME_TELEMETRY",  # import tensorflow
        "TPU_ML_PLATFORM",  # the same
        "TPU_ML_PLATFORM_VERSION",  # the same
        "HDF5_PLUGIN_PATH",  # import keras
        "TF_CPP_MIN_LOG_LEVEL",  # hvkeras.host.console quiets TensorFlow before its import, which reads it once
    }
)
# Open MPI leaves these behind when its ranks are killed; the harness sends its own jobs' elsewhere, so
# one seen here belongs to another program on this machine.
_OPEN_MPI_SEGMENTS = ("vader_segment.", "sm_segment.", "osc_rdma.", "ompi.", "opal_shmem_mmap.")
_IGNORED_FILES = frozenset({"__pycache__", ".coverage", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


def environment() -> dict[str, str]:
    """The environment, without what third parties set once."""
    return {name: value for name, value in os.environ.items() if name not in _THIRD_PARTY_VARIABLES}


def threads() -> set[threading.Thread]:
    """Every Python thread, without those that Python only knows as visitors from C++."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def children() -> set[psutil.Process]:
    """Every living child process, down to the last generation.

    Parents of warm ranks are left out, with their ranks, which may be those of another worker; what a job leaves is
    found by its mark.
    """
    found: set[psutil.Process] = set()
    for child in psutil.Process().children():
        if not warm.is_parent(child):
            found |= {child, *_children_of(child)}
    return {one for one in found if one.is_running() and "resource_tracker" not in " ".join(_command_line(one))}


def files() -> set[str]:
    """The names in the current folder."""
    return set(os.listdir()) - _IGNORED_FILES


def shared_memory() -> set[str]:
    """The names in /dev/shm that are not Open MPI's."""
    if not _SHARED_MEMORY.is_dir():
        return set()
    return {name for name in os.listdir(_SHARED_MEMORY) if not name.startswith(_OPEN_MPI_SEGMENTS)}


def is_foreign(segment: str) -> bool:
    """Whether a name in /dev/shm may be that of another program, such as of other tests on this machine."""
    path, session = str(_SHARED_MEMORY / segment), os.environ.get(warm.FOLDER)
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in ours and any(one.path.startswith(path) for one in process.memory_maps()):
                return True
            environ = process.environ() if process.pid not in ours else {}
            if path in environ.get("TMPDIR", "") or environ.get(warm.FOLDER, session) != session:
                return True  # of another session's job, or of one that has just ended there
        except (psutil.Error, OSError):
            continue
    return False


def left_after_grace(now: Callable[[], set[Item]], before: set[Item]) -> set[Item]:
    """What is there that was not before, once it has had a moment to go away."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := now() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
