"""Measures by how much a piece of work raises this process's peak resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

from hvkeras.host.memory import resident

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """Peak resident memory since this object was created; Linux only."""

    def __init__(self) -> None:
        self._before: int | None = None
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # freed memory would hide new allocations
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self._before = resident("VmRSS")

    def rise(self) -> int | None:
        """Bytes by which the peak since creation exceeds the resident memory at that time; None if unknown."""
        peak = resident("VmHWM") if self._before is not None else None
        return None if peak is None or self._before is None else max(0, peak - self._before)
