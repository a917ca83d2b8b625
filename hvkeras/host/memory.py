"""This process's memory, as Linux tells it."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident(name: str) -> int | None:
    """Resident memory in bytes: now, `VmRSS`, or at its peak, `VmHWM`; None where Linux does not tell."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
