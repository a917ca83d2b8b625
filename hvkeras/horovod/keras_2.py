"""Support for Keras 2 features in scripts written for Horovod, on Keras 3, with a notice on first use."""

from __future__ import annotations

import functools
from typing import Any

from hvkeras.compat import patches
from hvkeras.control.launch_environments import detect_launch
from hvkeras.errors import UsageError
from hvkeras.horovod import as_horovod
from hvkeras.host.console import prints_at, say
from hvkeras.settings import Settings


def install_hooks(module: Any) -> None:
    """Add Keras 2 features to a module of Keras 3, if `horovod` is an alias of hvkeras.

    Args:
        module: The module that has just been imported.
    """
    if as_horovod.is_installed():
        patches.install(patches.KERAS_2, _notify_once, {module.__name__: module})


def uninstall_hooks() -> None:
    """Restore Keras 3 to its original state."""
    patches.uninstall(patches.KERAS_2)


@functools.cache
def _notify_once(feature: str) -> None:
    """Print on rank 0 that a script uses a feature of Keras 2, when it does so first."""
    try:
        should_print = detect_launch().rank == 0 and prints_at(Settings(), "WARNING")
    except UsageError:
        return  # init() reports the error
    if should_print:
        say(f"{feature} is of Keras 2; --as-horovod makes it work on Keras 3")
