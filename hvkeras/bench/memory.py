"""By how much a piece of work raised this process's peak of resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

from hvkeras.host.memory import resident

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """The peak since it was made; Linux only."""

    def __init__(self) -> None:
        self._before: int | None = None
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # what was freed would hide what is allocated
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self._before = resident("VmRSS")

    def rise(self) -> int | None:
        """Bytes by which the peak since then exceeds what was resident at the start; None if unknown."""
        peak = resident("VmHWM") if self._before is not None else None
        return None if peak is None or self._before is None else max(0, peak - self._before)
