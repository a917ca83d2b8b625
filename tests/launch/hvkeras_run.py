"""Start `hvkeras run` and other commands of hvkeras in a clean environment, and find the processes that they leave."""

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

DEADLINE = 120.0  # seconds; every job of these tests must end within this time


class Started:
    """A running `hvkeras run`, or another command of hvkeras.

    Args:
        arguments: The arguments of the command.
        folder: Its working folder, also for temporary files.
        env: Further environment variables.
        path: A folder to prepend to the PATH.
        command: The command.
        deadline: Timeout in seconds.
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
        """Wait until `count` lines of standard output contain a text."""
        assert self.process.stdout is not None
        while count:
            line = self.process.stdout.readline()
            assert line, f"the job ended before it printed {text!r}"
            count -= text in line

    def finish(self) -> subprocess.CompletedProcess[str]:
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
        """Return the number of running processes of the job, including the launcher."""
        return len(list(marked(self._mark)))


def run(arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, path: Path | None = None,
        command: str = "run", deadline: float = DEADLINE) -> subprocess.CompletedProcess[str]:
    """Run `hvkeras run`, or another command, to its end. Fail the test if it leaves processes."""
    started = Started(arguments, folder, env, path, command, deadline)
    done = started.finish()
    assert not started.orphans, f"left behind: {started.orphans}\n{done.stderr}"
    return done


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time; rank = int(os.environ['HVKERAS_RUN_RANK'])\n" + code]


def warm_ranks(command: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
    """Convert the command line of a Python script or of `python(...)` to warm ranks (see `harness.warm`)."""
    return [*warm.python(clean_environment(Path()) | dict(env or {})), *command[1:]]
