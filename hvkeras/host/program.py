"""The program that this process runs, which can be restarted in the same process, and its environment variables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Program:
    """How this process was started.

    Attributes:
        folder: Its working folder.
        environment: Its environment variables.
    """

    folder: str
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> Program:
        """Returns the program of this process, before anything has changed its environment."""
        return cls(os.getcwd(), dict(os.environ))

    def restart(self, variables: Mapping[str, str], descriptor: int | None = None) -> NoReturn:
        """Replaces what this process runs with a new start of the program; its ID and its parent stay the same.

        Any thread may call this. Nothing is cleaned up: all other threads end, and all files are closed except the
        standard streams and one file.

        Args:
            variables: Environment variables that are added.
            descriptor: A file that the new start finds open, under the same descriptor; None for none.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.set_inheritable(int(name), int(name) == descriptor)
        os.chdir(self.folder)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**self.environment, **variables})


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables within the `with` block.

    Example:
        with env(HVKERAS_LOG_LEVEL="DEBUG"):
            hvd.init()

    Args:
        **kwargs: The variables; None unsets one.
    """
    before = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
