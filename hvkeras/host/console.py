"""What a process prints: lines of our own, and quiet engines."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from hvkeras.settings import LOG_LEVELS, Settings

# TensorFlow's C++ log takes the lowest severity that it still prints: 0 info, 1 warning, 2 error, 3 fatal.
_TENSORFLOW_LEVELS = {"TRACE": "0", "DEBUG": "0", "INFO": "0", "WARNING": "2", "ERROR": "3", "FATAL": "3"}


def say(text: str) -> None:
    """Prints one line of hvkeras's own to standard error, at once and whole, as long as anybody reads it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a pipe whose reader is gone, closed, or none
        sys.stderr.write(f"hvkeras: {text}\n")
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Gives this process the standard streams that it was started without; what goes there is lost.

    Else the next files and sockets that it opens would take their numbers, and get what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - for as long as the process lives
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def prints_at(settings: Settings, level: str) -> bool:
    """Says whether messages of `level` are printed under the log level in force."""
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index(settings.log_level)


def quiet_variables(log_level: str) -> dict[str, str]:
    """The variables that make TensorFlow and Horovod print no more than our log level asks for.

    They count only when set before TensorFlow is imported, which `import hvkeras` and `hvkeras run` see to.
    """
    return {"TF_CPP_MIN_LOG_LEVEL": _TENSORFLOW_LEVELS[log_level], "HOROVOD_LOG_LEVEL": log_level.lower()}


def quiet_engines(log_level: str) -> None:
    """Sets `quiet_variables` where the user has not set them."""
    for name, value in quiet_variables(log_level).items():
        os.environ.setdefault(name, value)
    logging.getLogger("tensorflow").setLevel(getattr(logging, {"TRACE": "DEBUG"}.get(log_level, log_level)))


def in_notebook() -> bool:
    """Whether what this process prints goes to a notebook's cell."""
    return type(sys.stdout).__module__.partition(".")[0] == "ipykernel"


def in_words(ranks: Sequence[int]) -> str:
    """Names ranks: `rank 1`, or `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
