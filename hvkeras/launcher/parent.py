"""A launcher that a process starts for itself, as `hvkeras.run` and `hvkeras compare` do, ends with that process."""

from __future__ import annotations

import os

# SIGTERM, at which `hvkeras run` ends its ranks, once the parent is gone; 1 is PR_SET_PDEATHSIG of <linux/prctl.h>.
_PROGRAM = """import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != {parent}:
    raise SystemExit(128 + signal.SIGTERM)
"""


def ends_with_parent() -> str:
    """The first lines of a Python program that this process starts: it gets SIGTERM when this one is gone, however."""
    return _PROGRAM.format(parent=os.getpid())
