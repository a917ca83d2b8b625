"""Ends a launcher together with the process that started it, such as `hvkeras.run` or `hvkeras compare`."""

from __future__ import annotations

import os

# Sends SIGTERM, on which `hvkeras run` ends its ranks, once the parent is gone.
# 1 is PR_SET_PDEATHSIG from <linux/prctl.h>.
_PROGRAM = """import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != {parent}:
    raise SystemExit(128 + signal.SIGTERM)
"""


def ends_with_parent() -> str:
    """Returns the first lines of a Python child's program, which give it SIGTERM however this process ends."""
    return _PROGRAM.format(parent=os.getpid())
