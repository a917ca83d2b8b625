"""Starts `hvkeras run` and its like for tests, in a clean environment, and finds what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import warm
from harness.launchers import BIN, clean_environment
from harness.processes import MARK, end_marked, marked

DEADLINE = 120.0  # seconds in which every job of these tests must end


class Started:
    """A running `hvkeras run`, or another command of hvkeras.

    Args:
        arguments: What follows the command.
        folder: Its working folder, also for temporary files.
        env: More environment variables.
        path: A folder to put first on the PATH.
        command: The command.
        deadline: Seconds in which it must end.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None,
                 path: Path | None = None, command: str = "run", deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._mark = uuid.uuid4().hex
        environment = clean_environment(folder) | dict(env or {}) | {MARK: self._mark}
        if path is not None:
            environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
        self.process = subprocess.Popen([str(BIN / "hvkeras"), command, *arguments], cwd=folder, env=environment,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Waits until `count` lines of standard output hold a text."""
        assert self.process.stdout is not None
        while count:
            line = self.process.stdout.readline()
            assert line, f"the job ended before it printed {text!r}"
            count -= text in line

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Waits for the end."""
        try:
            stdout, stderr = self.process.communicate(timeout=self._deadline)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"hvkeras did not end\n{stdout}\n{stderr}") from None
        finally:
            self.orphans = end_marked(self._mark, grace=5.0)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, stdout, stderr)

    def living(self) -> int:
        """How many processes of the job live, the launcher among them."""
        return len(list(marked(self._mark)))


def run(arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, path: Path | None = None,
        command: str = "run", deadline: float = DEADLINE) -> subprocess.CompletedProcess[str]:
    """Runs `hvkeras run`, or another command, to its end; leaving a process behind fails the test."""
    started = Started(arguments, folder, env, path, command, deadline)
    done = started.finish()
    assert not started.orphans, f"left behind: {started.orphans}\n{done.stderr}"
    return done


def python(code: str) -> list[str]:
    """A command line for ranks that run a few lines of Python."""
    return [sys.executable, "-c", "import os, sys, time; rank = int(os.environ['HVKERAS_RUN_RANK'])\n" + code]


def warm_ranks(command: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
    """The same command line of a Python script or `python(...)` for warm ranks (see `harness.warm`).

    Args:
        command: Python, the script or `-c`, and its arguments.
        env: More environment variables of the job.
    """
    return [*warm.python(clean_environment(Path()) | dict(env or {})), *command[1:]]
