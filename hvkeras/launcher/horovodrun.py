"""Detection of Horovod's own launcher."""

from __future__ import annotations

import importlib.util


def horovod_is_installed() -> bool:
    """Returns whether Horovod's launcher can be imported."""
    try:
        return importlib.util.find_spec("horovod.runner.launch") is not None
    except ImportError:
        return False
