"""This process's memory, as Linux reports it."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident(name: str) -> int | None:
    """Returns resident memory in bytes, current (`VmRSS`) or peak (`VmHWM`); None where Linux does not report it."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
