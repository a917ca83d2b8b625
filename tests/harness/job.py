"""One job of several ranks: start, supervision until its end or deadline, and cleanup."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import warm
from harness.checks import RESULTS
from harness.launchers import Command, announced_rank, clean_environment, commands
from harness.processes import MARK, dump_stacks, end_marked, marked

_POLL_SECONDS = 0.1
# With the default of 1 ms, Horovod's threads take a fifth of the cores.
_BACKEND_VARIABLES = {"horovod": {"HOROVOD_CYCLE_TIME": "5"}}
_RANK_TAG = re.compile(r"\[[\d,]+\]<std(?:out|err)>:")  # horovodrun enables them in mpirun's output, also in the files
_FAILED = re.compile(r"(?m)Traceback \(most recent call last\)|^Fatal Python error|^\*\*\* Process received signal")


class LaunchError(AssertionError):
    """Raised if a job did not end as the test expects. The message contains the logs.

    Args:
        text: The message.
        outcome: The outcome of the job, if it has ended.
    """

    def __init__(self, text: str, outcome: Outcome | None = None) -> None:
        super().__init__(text)
        self.outcome = outcome


@dataclass(frozen=True)
class Outcome:
    """Outcome of a finished job.

    Attributes:
        np: Number of ranks.
        exit_codes: Exit codes of the processes that the harness started, in that order: the launcher's or,
            with TF_CONFIG, those of all ranks. A negative code is a signal.
        seconds: Duration.
        output: Stdout and stderr of the launcher itself; "" with TF_CONFIG.
        first_failing: The rank whose log showed a failure first, or None.
        orphans: Processes that outlived the launcher and had to be killed.
        folder: Folder of the logs and results.
        cwd: The ranks' working folder, which exists until the end of the test session.
    """

    np: int
    exit_codes: tuple[int, ...]
    seconds: float
    output: str
    first_failing: int | None
    orphans: tuple[str, ...]
    folder: Path
    cwd: Path

    @property
    def exit_code(self) -> int:
        """The job's exit code: the first nonzero one, or 0."""
        return next((code for code in self.exit_codes if code), 0)

    def stdout(self, rank: int) -> str:
        """Return the standard output of a rank."""
        return read_log(self.folder, rank, "stdout")

    def stderr(self, rank: int) -> str:
        """Return the standard error of a rank."""
        return read_log(self.folder, rank, "stderr")

    def results(self, check: str) -> list[Any]:
        """Return the values of a check, in rank order.

        Raises:
            LaunchError: The check raised on a rank, or did not run there.
        """
        return [self.result(check, rank) for rank in range(self.np)]

    def result(self, check: str, rank: int) -> Any:
        """Return the value of a check on one rank.

        Raises:
            LaunchError: The check raised, or did not run.
        """
        path = self.folder / "results" / f"rank.{rank}.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        errors = [f"check {name} raised:\n{one['error']}" for name, one in results.items() if "error" in one]
        if "value" not in results.get(check, {}):
            reason = "\n".join(errors) or self.stderr(rank)[-3000:]
            raise LaunchError(f"rank {rank} has no result of {check}: {reason}\n{self.report()}", self)
        return results[check]["value"]

    def failing_log(self) -> str:
        """Return the end of the log of the rank that failed first, or of rank 0."""
        rank = self.first_failing or 0
        return f"rank {rank}'s standard error ({self.folder}) ends with\n{_tail(self.stderr(rank), 40)}"

    def report(self) -> str:
        """Return the failure as text, with the logs of the first failing rank, the launcher and the other ranks."""
        first = 0 if self.first_failing is None else self.first_failing
        order = [first, *(rank for rank in range(self.np) if rank != first)]
        parts = [f"exit codes {list(self.exit_codes)} after {self.seconds:.1f} s; logs in {self.folder}"]
        if self.first_failing is not None:
            parts.append(f"the first failing rank is {self.first_failing}")
        for rank in order:
            parts.append(f"--- rank {rank}, end of stderr:\n{_tail(self.stderr(rank), 60 if rank == first else 15)}")
            parts.append(f"--- rank {rank}, end of stdout:\n{_tail(self.stdout(rank), 10)}")
            if rank == first:
                parts.append(f"--- launcher:\n{_tail(self.output, 30)}")
        return "\n".join(parts)


class Job:
    """A running job, created by `start_job`."""

    def __init__(self, np: int, folder: Path, expect_failure: bool, deadline: float) -> None:
        self.np, self.folder, self.cwd, self.expect_failure = np, folder, folder / "cwd", expect_failure
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        self._ends = self._began + deadline
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started: list[tuple[Command, Mapping[str, str]]] = []
        self._ranks: list[int | None] = []
        self._first_failing: int | None = None
        # A short path in memory, for Open MPI's sockets and shared segments.
        self._scratch = Path(tempfile.mkdtemp(prefix="harness-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        for path in (self.cwd, folder / "results", folder / "logs"):
            path.mkdir(parents=True)

    def start(self, command: Command, env: Mapping[str, str]) -> None:
        """Start one process of the job, in a new session."""
        environment = clean_environment(self._scratch) | dict(command.environment) | dict(env)
        environment |= {MARK: self._mark, RESULTS: str(self.folder / "results")}
        logs = self.folder / ("launcher" if command.rank is None else f"logs/rank.{command.rank}")
        logs.mkdir(parents=True, exist_ok=True)
        self._ranks.append(command.rank)
        self._started.append((command, env))
        with open(logs / "stdout", "ab") as out, open(logs / "stderr", "ab") as err:
            self._processes.append(
                subprocess.Popen(
                    command.arguments,
                    cwd=self.cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err if command.rank is not None else out,
                    start_new_session=True,
                )
            )

    def start_again(self, rank: int) -> None:
        """Wait for the end of a rank's process, and restart it. It appends to the rank's log."""
        self._processes[rank].wait(timeout=10)
        self.start(*self._started[rank])

    def launcher(self) -> subprocess.Popen[bytes]:
        """Return the launcher's process; with TF_CONFIG, that of the first rank."""
        return self._processes[0]

    def pid(self, rank: int) -> int:
        """Wait for the start of a rank, and return its process id."""
        while True:
            ranks = [process for process, environ in marked(self._mark) if announced_rank(environ) == rank]
            pids = {process.pid for process in ranks}
            top = [process.pid for process in ranks if process.ppid() not in pids and "python" in process.name()]
            if top:
                return int(top[0])
            self._wait_a_moment(f"rank {rank} never started")

    def wait_for(self, rank: int, text: str, stream: str = "stdout") -> None:
        """Wait until a rank has printed a text."""
        while text not in read_log(self.folder, rank, stream):
            self._wait_a_moment(f"rank {rank} never printed {text!r} to {stream}")

    def wait(self, deadline: float | None = None) -> Outcome:
        """Wait for the end of the job.

        Args:
            deadline: Seconds from now; None for the job's own deadline.

        Raises:
            LaunchError: The job did not end before the deadline, or not as expected.
        """
        if deadline is not None:
            self._ends = time.monotonic() + deadline
        while any(process.poll() is None for process in self._processes):
            self._note_first_failure()
            if not self.expect_failure and any(process.poll() for process in self._processes):
                break  # an unexpected failure: do not wait for the other ranks
            self._wait_a_moment("the job never ended")
        outcome = self._finish()
        if bool(outcome.exit_code) != self.expect_failure:
            raise LaunchError(f"the job should {'fail' if self.expect_failure else 'succeed'}: {outcome.report()}",
                              outcome)
        return outcome

    def _wait_a_moment(self, complaint: str) -> None:
        if time.monotonic() > self._ends:
            dump_stacks(self._mark)
            time.sleep(1)
            outcome = self._finish()
            raise LaunchError(f"{complaint} before its deadline: {outcome.report()}", outcome)
        time.sleep(_POLL_SECONDS)

    def _note_first_failure(self) -> None:
        if self._first_failing is None:
            failing = [rank for rank in range(self.np) if _FAILED.search(read_log(self.folder, rank, "stderr"))]
            failed = [rank for rank, process in zip(self._ranks, self._processes, strict=True) if process.poll()]
            self._first_failing = next((rank for rank in [*failing, *failed] if rank is not None), None)

    def _finish(self) -> Outcome:
        seconds = time.monotonic() - self._began
        running = any(process.poll() is None for process in self._processes)
        orphans = end_marked(self._mark, grace=0.0 if running else 2.0)
        codes = tuple(process.wait(timeout=10) for process in self._processes)
        self._note_first_failure()
        output = self.folder / "launcher" / "stdout"
        text = _RANK_TAG.sub("", output.read_text(errors="replace")) if output.exists() else ""
        outcome = Outcome(self.np, codes, seconds, text, self._first_failing, tuple(() if running else orphans),
                          self.folder, self.cwd)
        recent.append(outcome)
        return outcome

    def clean_up(self) -> None:
        """Kill the remaining processes, and remove temporary files."""
        end_marked(self._mark)
        for process in self._processes:
            process.wait(timeout=10)
        shutil.rmtree(self._scratch, ignore_errors=True)


recent: list[Outcome] = []  # of the current test


@contextlib.contextmanager
def start_job(
    launcher: str,
    script: Path,
    arguments: Sequence[str] = (),
    *,
    np: int,
    folder: Path,
    backend: str = "",
    env: Mapping[str, str] | None = None,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    start_order: Sequence[int] | None = None,
    start_delay: float = 0.0,
    roles: Sequence[str] = (),
    expect_failure: bool = False,
    deadline: float = 240.0,
    cold: bool = False,
    python: Sequence[str] = (),
) -> Iterator[Job]:
    """Start a job, and clean up after it.

    Args:
        launcher: One of `LAUNCHERS`.
        script: The script that every rank runs.
        arguments: The script's arguments.
        np: Number of ranks.
        folder: Parent of the new folder for the job's logs and results.
        backend: The value of `HVKERAS_BACKEND`; unset if empty.
        env: Further environment variables for all processes.
        rank_env: Further environment variables by rank; with `tf_config` only.
        start_order: The ranks to start, in this order; with `tf_config` only.
        start_delay: Seconds between two starts; with `tf_config` only.
        roles: Role of each rank in the cluster, in the order of `launchers.ROLES`; with `tf_config` only.
        expect_failure: Whether the job must fail rather than succeed.
        deadline: Seconds after which the job is killed and the test fails.
        cold: Whether each rank is a new Python process, a child of its launcher, instead of forked (`harness.warm`).
        python: Command that runs the script, such as the Python of another environment; default: this Python.

    Yields:
        The running job.
    """
    job = Job(np, Path(tempfile.mkdtemp(prefix=f"{launcher}-", dir=folder)), expect_failure, deadline)
    extra = _BACKEND_VARIABLES.get(backend, {}) | dict(env or {}) | ({"HVKERAS_BACKEND": backend} if backend else {})
    try:
        python = python or ([sys.executable] if cold else warm.python(clean_environment(job.folder) | extra))
        found = commands(launcher, np, [str(script), *arguments], job.folder / "logs", roles, python)
        for command in [found[rank] for rank in start_order] if start_order is not None else found:
            job.start(command, extra | dict((rank_env or {}).get(-1 if command.rank is None else command.rank, {})))
            time.sleep(start_delay)
        yield job
    finally:
        job.clean_up()


def read_log(folder: Path, rank: int, stream: str) -> str:
    """Return a rank's log; launchers write it to different folders below `logs`."""
    for path in sorted((folder / "logs").glob(f"**/{stream}")):
        match = re.fullmatch(r"rank\.(\d+)", path.parent.name)
        if match and int(match[1]) == rank:
            return _RANK_TAG.sub("", path.read_text(errors="replace"))
    return ""


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])
