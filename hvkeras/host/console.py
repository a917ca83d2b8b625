"""Console output: messages of hvkeras, log levels of the engines, and formatting of message texts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from hvkeras.settings import LOG_LEVELS, Settings

# The lowest severity that TensorFlow's C++ log prints: 0 info, 1 warning, 2 error, 3 fatal.
_TENSORFLOW_LEVELS = {"TRACE": "0", "DEBUG": "0", "INFO": "0", "WARNING": "2", "ERROR": "3", "FATAL": "3"}

_STDERR = 2  # file descriptor of the engines' messages
_SHOWN = 8  # maximum number of listed items
_FEW = 3  # more consecutive numbers than this are shown as a range


def say(text: str) -> None:
    """Print one line to standard error, unbuffered and in one write; ignore a closed stream."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a broken pipe, a closed stream, or no stream
        sys.stderr.write(f"hvkeras: {text}\n")
        sys.stderr.flush()


def say_last(text: str) -> None:
    """Print the last line of this process, and suppress all later messages of engines."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # as in `say`
        sys.stderr.flush()
        is_own = sys.stderr.fileno() == _STDERR
        stream = os.fdopen(os.dup(_STDERR), "w", encoding="utf-8", errors="backslashreplace") if is_own else sys.stderr
        mute_engines()
        stream.write(f"hvkeras: {text}\n")
        stream.flush()


def mute_engines() -> None:
    """Redirect the engines' messages to /dev/null: collectives aborted by this exit would print after its report."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDERR)
    os.close(null)


def open_closed_streams() -> None:
    """Open /dev/null for the standard streams that this process was started without.

    Otherwise the next files and sockets would get their descriptor numbers, and receive the output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def prints_at(settings: Settings, level: str) -> bool:
    """Return whether messages of `level` are printed at the current log level."""
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index(settings.log_level)


def quiet_variables(log_level: str) -> dict[str, str]:
    """Return the environment variables that apply our log level to TensorFlow and Horovod.

    They must be set before TensorFlow is imported; `import hvkeras` and `hvkeras run` ensure that.
    """
    return {"TF_CPP_MIN_LOG_LEVEL": _TENSORFLOW_LEVELS[log_level], "HOROVOD_LOG_LEVEL": log_level.lower()}


def quiet_engines(log_level: str) -> None:
    """Set the variables of `quiet_variables` that the user has not set."""
    for name, value in quiet_variables(log_level).items():
        os.environ.setdefault(name, value)
    logging.getLogger("tensorflow").setLevel(getattr(logging, {"TRACE": "DEBUG"}.get(log_level, log_level)))


def in_notebook() -> bool:
    """Return whether this process prints to a notebook cell."""
    return type(sys.stdout).__module__.partition(".")[0] == "ipykernel"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format rank numbers as text: `rank 1`, `ranks 1, 3`, or `ranks 0, 512 to 1023`."""
    return f"rank{'s' * (len(ranks) > 1)} {format_numbers(ranks)}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Format any number of integers as a short text: `1, 3`, or `0, 512 to 1023`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    parts = [part for first, last in runs
             for part in ([(first, last)] if last - first >= _FEW else [(one, one) for one in range(first, last + 1)])]
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in parts[:_SHOWN]]
    return _with_rest(shown, sum(last - first + 1 for first, last in parts[_SHOWN:]))


def some_of(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first few texts, with the number of omitted ones: `node1, node2 and 298 more`."""
    return _with_rest(texts[:_SHOWN], len(texts[_SHOWN:]), separator)


def _with_rest(shown: Sequence[str], more: int, separator: str = ", ") -> str:
    rest = f"and {more} more"
    if more and "\n" not in separator:
        return f"{separator.join(shown)} {rest}"
    return separator.join([*shown, rest] if more else shown)
