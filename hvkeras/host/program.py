"""Program of this process, which can be restarted in the same process, and environment variables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Program:
    """Working folder and environment variables at the start of this process."""

    folder: str
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> Program:
        """Capture the current working folder and environment."""
        return cls(os.getcwd(), dict(os.environ))

    def restart(self, variables: Mapping[str, str], descriptor: int | None = None) -> NoReturn:
        """Restart the program in this process by `exec`; its process ID and parent stay the same.

        Any thread may call this. There is no cleanup: all other threads end, and all files are closed except the
        standard streams and one file.

        Args:
            variables: Additional environment variables.
            descriptor: File descriptor that stays open; None for none.
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
    """Set environment variables within the `with` block.

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
