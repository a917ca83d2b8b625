"""Has Keras 3 take Keras 2's ways, which scripts for Horovod go, and says so once."""

from __future__ import annotations

import functools
from typing import Any

from hvkeras import as_horovod
from hvkeras.compat import keras_2
from hvkeras.errors import UsageError
from hvkeras.host.console import prints_at, say
from hvkeras.launch_environments import detect_launch
from hvkeras.settings import Settings


def take_over(module: Any) -> None:
    """Gives what a module of Keras 3 defines Keras 2's ways as well, while `import horovod` means hvkeras.

    Args:
        module: The module, just imported.
    """
    if as_horovod.is_installed():
        keras_2.take_over(module, _say_once)


def give_back() -> None:
    """Makes Keras 3 again what it was."""
    keras_2.give_back()


@functools.cache
def _say_once() -> None:
    """Says on rank 0, when a script first goes one of the ways, which there are."""
    try:
        speaks = detect_launch().rank == 0 and prints_at(Settings(), "WARNING")
    except UsageError:
        return  # init() tells it
    if speaks:
        say(f"this script goes ways of Keras 2, and Keras 3 takes them here: {', '.join(keras_2.WAYS)} (--as-horovod)")
