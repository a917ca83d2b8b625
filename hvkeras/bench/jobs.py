"""The jobs of a benchmark: each engine has its own ranks, which are stopped while others are measured.

An engine's threads run even when no collective is requested (Horovod's negotiates with the other ranks every
millisecond), and would take time from the engine being measured. So the ranks of all jobs but one are stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvkeras.bench.channel import Channel, ChannelClosedError, Listener
from hvkeras.bench.row import KEPT_BY_THE_BENCHMARK, BenchmarkRow

TICK = 0.1  # seconds between two checks of a job
EXIT_GRACE = 20.0  # seconds that a job has to end and report the cause after its rank 0 is gone

# Kills the registered ranks when the benchmark is gone, however it ended: stopped ranks cannot notice that themselves.
_WATCHDOG = """import os, signal, sys
def began(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
signal.signal(signal.SIGINT, signal.SIG_IGN)
known = {}
for line in sys.stdin:
    known[int(line)] = began(int(line))
for pid, begin in known.items():
    if begin and began(pid) == begin:
        os.kill(pid, signal.SIGKILL)"""


DescribeFailure = Callable[[str, int], str]  # (standard error, exit code) -> the cause of failure in one line
End = Callable[["subprocess.Popen[bytes]"], None]


class TimeIsUpError(Exception):
    """The benchmark exceeded its time limit."""


class Watchdog:
    """A watchdog process: makes sure that no stopped rank is left behind."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WATCHDOG], stdin=subprocess.PIPE,
                                         text=True, start_new_session=True, stderr=subprocess.DEVNULL)

    def watch(self, pids: Sequence[int]) -> None:
        """Register more ranks."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{pid}\n" for pid in pids))
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill the ranks that are still running."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class BenchmarkJob:
    """The ranks that run one engine, started by a launcher.

    Args:
        folder: The folder for their output and their plan.
        command: The command that starts them; the folder is appended to it.
        describe_failure: Returns why the job failed, in one line.
        end: Ends the process that `command` started.
        deadline: The monotonic time by which the benchmark must be over.
    """

    def __init__(self, folder: Path, command: Sequence[str], describe_failure: DescribeFailure, end: End,
                 deadline: float) -> None:
        self.folder = folder
        self._command, self._deadline = [*command, str(folder)], deadline
        self._describe_failure, self._end_process = describe_failure, end
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._pids: list[int] = []
        self.reason = ""

    def start(self, plan: Mapping[str, Any], environment: Mapping[str, str], watchdog: Watchdog) -> None:
        """Start the ranks, waits until they are ready, and stops them. If they fail, `reason` says why.

        Args:
            plan: Their plan.
            environment: Their environment.
            watchdog: The watchdog that their processes are registered with.

        Raises:
            TimeIsUpError: The benchmark takes too long.
        """
        self.folder.mkdir()
        listener = Listener(self.folder)
        try:
            (self.folder / "plan.json").write_text(json.dumps(plan))
            with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as errors:
                self._process = subprocess.Popen(self._command, env=dict(environment), stdin=subprocess.DEVNULL,
                                                 stdout=out, stderr=errors, start_new_session=True)
            while self._channel is None:
                if self._process.poll() is not None:
                    self._fail()
                    return
                self._check_time()
                self._channel = listener.accept(TICK)
        finally:
            listener.close()
        try:
            self._pids = self._answer()
        except ChannelClosedError:
            self._fail()
            return
        watchdog.watch(self._pids)
        self._signal(signal.SIGSTOP)

    def ask(self, *request: Any) -> Any:
        """Resume the ranks, has them handle a request, and stops them again.

        Returns:
            The answer of rank 0; None if the job ended, in which case `reason` says why.

        Raises:
            TimeIsUpError: The benchmark takes too long.
        """
        if self.reason:
            return None
        assert self._channel is not None
        try:
            with self._awake():
                self._channel.send(request)
                return self._answer()
        except ChannelClosedError:
            self._fail()
            return None

    def close(self) -> None:
        """End the ranks, gracefully if possible."""
        if self._process is None:
            return
        if self._channel is not None and not self.reason:
            with contextlib.suppress(ChannelClosedError, TimeIsUpError):
                self._signal(signal.SIGCONT)
                self._channel.send(["end"])
                self._await_exit()
        self._signal(signal.SIGCONT)
        self._end_process(self._process)
        if self._channel is not None:
            self._channel.close()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _answer(self) -> Any:
        assert self._channel is not None
        while True:
            with contextlib.suppress(TimeoutError):
                return self._channel.receive(TICK)
            self._check_time()

    def _fail(self) -> None:
        """Wait for the job to end and determines the cause."""
        assert self._process is not None
        self._signal(signal.SIGCONT)
        self._await_exit()
        self._end_process(self._process)
        self._pids = []
        text = (self.folder / "stderr").read_text(errors="replace")
        self.reason = f"{self._describe_failure(text, self._process.returncode)}; output of all ranks: {self.folder}"

    def _await_exit(self) -> None:
        assert self._process is not None
        end = time.monotonic() + EXIT_GRACE
        while self._process.poll() is None and time.monotonic() < end:
            self._check_time()
            time.sleep(TICK)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeIsUpError


class Remote:
    """A participant in a job, as seen by the process that runs the benchmark; a failure is recorded in its row.

    Args:
        row: Its row.
        job: The job.
        place: Its place among the participants of that job.
    """

    def __init__(self, row: BenchmarkRow, job: BenchmarkJob | None, index: int) -> None:
        self.row, self._job, self._place = row, job, index

    def prepare(self) -> None:
        """Build and traces the participant, runs it once, and verify the result."""
        self._update(self._ask("prepare"))

    def timed(self, calls: int, part: str = "") -> tuple[float, float]:
        """Run a block of the whole work, or of a part of it.

        Args:
            calls: How often it is done.
            part: The part; "" for the whole work.

        Returns:
            The mean seconds per call, and the seconds of the processor that all ranks together took for a call.
        """
        answer = self._ask("time", calls, part)
        seconds, busy, row = answer or (0.0, 0.0, None)
        self._update(row)
        return float(seconds), float(busy)

    def finish(self) -> None:
        """Run the checks that are only possible at the end."""
        self._update(self._ask("finish"))

    def _ask(self, what: str, *arguments: Any) -> Any:
        assert self._job is not None  # one without a job has a reason and is not measured
        return self._job.ask(what, self._place, *arguments)

    def _update(self, answer: Mapping[str, Any] | None) -> None:
        """Update the row from the ranks' copy, except for what is kept here."""
        if answer is None:
            self.row.reason = self._job.reason if self._job is not None else ""
        else:
            before, self.row = self.row, BenchmarkRow.from_json(answer)
            for name in KEPT_BY_THE_BENCHMARK:
                setattr(self.row, name, getattr(before, name))
            self.row.parts |= before.parts
