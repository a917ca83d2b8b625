"""The memory of this process and of its host, as Linux reports them."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS, _HOST, _CONTAINER = Path("/proc/self/status"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def resident(name: str) -> int | None:
    """Returns resident memory in bytes, current (`VmRSS`) or peak (`VmHWM`); None where Linux does not report it."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


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
