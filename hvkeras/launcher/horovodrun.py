"""Horovod's own launcher, where it is installed."""

from __future__ import annotations

import importlib.util


def horovod_is_installed() -> bool:
    """Says whether Horovod's launcher can be imported."""
    try:
        return importlib.util.find_spec("horovod.runner.launch") is not None
    except ImportError:
        return False
