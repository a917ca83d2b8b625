"""The memory of this process and of its host, as Linux reports them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of glibc's mallopt, from <malloc.h>
FEW_THREADS = 4  # that may share one heap
_KEPT, _IN_HEAP = 2**31 - 1, 32 * 1024**2  # bytes: what the end of the heap may keep, and the most that glibc allows
_STATUS, _HOST, _CONTAINER = Path("/proc/self/status"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def resident(name: str) -> int | None:
    """Returns resident memory in bytes, current (`VmRSS`) or peak (`VmHWM`); None where Linux does not report it."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def keep_freed(threads: int) -> None:
    """Makes the C library keep freed memory for the next allocation, instead of returning it to Linux.

    A training step frees what the next one allocates again, and Linux clears each page that it hands out. The end of
    the heap keeps up to 2 GiB. Other heaps, which threads get, are returned as soon as they are empty whatever is set,
    so with few threads all share one; with many they would wait for each other. Does nothing if the user has set how
    glibc's malloc works, or where the C library is another one.

    Args:
        threads: How many threads compute at the same time.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _IN_HEAP)  # setting one of them fixes the other
        if threads <= FEW_THREADS:
            mallopt(_ARENA_MAX, 1)


def available() -> int | None:
    """Returns how many bytes this host, or the container, has left without swapping; None where Linux does not say."""
    rooms = [_number(_HOST, "MemAvailable:") * 1024] if _HOST.exists() else []
    limit = _CONTAINER / "memory.max"  # of a container, as cgroups of version 2 describe it
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        used = int((_CONTAINER / "memory.current").read_text()) - _number(_CONTAINER / "memory.stat", "inactive_file")
        rooms.append(max(0, int(most) - used))
    return min(rooms, default=None)


def _number(file: Path, name: str) -> int:
    found = re.search(rf"^{name}\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
