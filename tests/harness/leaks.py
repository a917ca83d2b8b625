"""Detection of leaks: environment variables, threads, child processes, files and shared memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from harness import warm
from harness.processes import below, command_line

Item = TypeVar("Item")

_GRACE_SECONDS = 3.0
_SHARED_MEMORY = Path("/dev/shm")

# Variables that third parties set on import or first use, and never reset.
_THIRD_PARTY_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",  # pytest itself, per phase of a test
        "TF2_BEHAVIOR",  # import tensorflow
        "ENABLE_RUNTIME_UPTIME_TELEMETRY",  # import tensorflow
        "TPU_ML_PLATFORM",  # import tensorflow
        "TPU_ML_PLATFORM_VERSION",  # import tensorflow
        "HDF5_PLUGIN_PATH",  # import keras
        "TF_CPP_MIN_LOG_LEVEL",  # hvkeras.host.console quiets TensorFlow before its import, which reads it once
    }
)
# Open MPI leaves these segments when its ranks are killed. Jobs of the harness have them in another folder, so those
# in /dev/shm belong to other programs.
_OPEN_MPI_SEGMENTS = ("vader_segment.", "sm_segment.", "osc_rdma.", "ompi.", "opal_shmem_mmap.")
_IGNORED_FILES = frozenset({"__pycache__", ".coverage", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


def environment() -> dict[str, str]:
    """Return the environment without `_THIRD_PARTY_VARIABLES`."""
    return {name: value for name, value in os.environ.items() if name not in _THIRD_PARTY_VARIABLES}


def threads() -> set[threading.Thread]:
    """Return all threads that Python has started; C++ threads that call Python do not count."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def children() -> set[psutil.Process]:
    """Return all running descendant processes.

    Fork servers and their ranks do not count, as they may belong to another worker; `Job` finds orphans by
    their mark.
    """
    found: set[psutil.Process] = set()
    for child in psutil.Process().children():
        if not warm.is_server(child):
            found |= {child, *below(child.pid)}
    return {one for one in found if one.is_running() and "resource_tracker" not in command_line(one)}


def files() -> set[str]:
    """Return the names in the current folder."""
    return set(os.listdir()) - _IGNORED_FILES


def shared_memory() -> set[str]:
    """Return the names in /dev/shm except Open MPI's."""
    if not _SHARED_MEMORY.is_dir():
        return set()
    return {name for name in os.listdir(_SHARED_MEMORY) if not name.startswith(_OPEN_MPI_SEGMENTS)}


def is_foreign(segment: str) -> bool:
    """Return whether a segment in /dev/shm may belong to another program, such as another test session."""
    path, session = str(_SHARED_MEMORY / segment), os.environ.get(warm.FOLDER)
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in ours and any(one.path.startswith(path) for one in process.memory_maps()):
                return True
            environ = process.environ() if process.pid not in ours else {}
            if path in environ.get("TMPDIR", "") or environ.get(warm.FOLDER, session) != session:
                return True  # of a job of another session, maybe of one that has just ended
        except (psutil.Error, OSError):
            continue
    return False


def left_after_grace(now: Callable[[], set[Item]], before: set[Item]) -> set[Item]:
    """Return the new items that remain after a grace period."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := now() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
