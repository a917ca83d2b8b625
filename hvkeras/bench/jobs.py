"""Jobs of a benchmark: each engine has its own ranks, which are stopped (SIGSTOP) while others are measured.

An engine's threads run even without collectives, and would slow down the engine that is measured: Horovod's thread
negotiates with the other ranks every millisecond. Therefore the ranks of all jobs except one are stopped.
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
from hvkeras.bench.row import LOCAL_FIELDS, BenchmarkRow

TICK = 0.1  # seconds between two checks of a job
EXIT_GRACE = 20.0  # seconds for a job to end and report the cause after its rank 0 has ended

# Kills the registered ranks when the benchmark has ended for any reason, which stopped ranks cannot detect.
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


class BenchmarkTimeoutError(Exception):
    """The benchmark exceeded its time limit."""


class Watchdog:
    """Process that kills stopped ranks when the benchmark has ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WATCHDOG], stdin=subprocess.PIPE,
                                         text=True, start_new_session=True, stderr=subprocess.DEVNULL)

    def watch(self, pids: Sequence[int]) -> None:
        """Register ranks by process ID."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{pid}\n" for pid in pids))
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill the registered ranks that still exist."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class BenchmarkJob:
    """Ranks of one engine, started by a launcher.

    Args:
        folder: Folder for the ranks' output and plan.
        command: Command that starts the ranks; the folder is appended to it.
        describe_failure: Returns the cause of the job's failure, in one line.
        end: Terminates the process that `command` started.
        deadline: Monotonic time until which the benchmark must complete.
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
        """Start the ranks, wait until they are ready, and stop them. If they fail, set `reason`.

        Args:
            plan: Plan of the job.
            environment: Environment variables of the ranks.
            watchdog: Watchdog to register the ranks with.

        Raises:
            BenchmarkTimeoutError: The benchmark exceeds its timeout.
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
            self._pids = self._response()
        except ChannelClosedError:
            self._fail()
            return
        watchdog.watch(self._pids)
        self._signal(signal.SIGSTOP)

    def request(self, *message: Any) -> Any:
        """Resume the ranks, send a request, and stop them after the response.

        Returns:
            The response of rank 0; None if the job has failed, with `reason` set.

        Raises:
            BenchmarkTimeoutError: The benchmark exceeds its timeout.
        """
        if self.reason:
            return None
        assert self._channel is not None
        try:
            with self._resumed():
                self._channel.send(message)
                return self._response()
        except ChannelClosedError:
            self._fail()
            return None

    def close(self) -> None:
        """Terminate the ranks, gracefully if possible."""
        if self._process is None:
            return
        if self._channel is not None and not self.reason:
            with contextlib.suppress(ChannelClosedError, BenchmarkTimeoutError):
                self._signal(signal.SIGCONT)
                self._channel.send(["end"])
                self._await_exit()
        self._signal(signal.SIGCONT)
        self._end_process(self._process)
        if self._channel is not None:
            self._channel.close()

    @contextlib.contextmanager
    def _resumed(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _response(self) -> Any:
        assert self._channel is not None
        while True:
            with contextlib.suppress(TimeoutError):
                return self._channel.receive(TICK)
            self._check_time()

    def _fail(self) -> None:
        """Wait for the job to end, and set the cause."""
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
            raise BenchmarkTimeoutError


class Remote:
    """Participant of a job, as seen by the benchmark process; failures are stored in the row.

    Args:
        row: Row for the results.
        index: Index of the participant in the job.
    """

    def __init__(self, row: BenchmarkRow, job: BenchmarkJob | None, index: int) -> None:
        self.row, self._job, self._index = row, job, index

    def prepare(self) -> None:
        """Build and trace the participant, run it once, and verify the result."""
        self._update(self._request("prepare"))

    def timed(self, calls: int, part: str = "") -> tuple[float, float]:
        """Run a block of the complete work, or of a part of it.

        Args:
            calls: Number of calls in the block.
            part: Name of the part; "" for the complete work.

        Returns:
            Mean seconds per call, and CPU seconds per call, summed over all ranks.
        """
        answer = self._request("time", calls, part)
        seconds, busy, row = answer or (0.0, 0.0, None)
        self._update(row)
        return float(seconds), float(busy)

    def finish(self) -> None:
        """Run the final checks."""
        self._update(self._request("finish"))

    def _request(self, what: str, *arguments: Any) -> Any:
        assert self._job is not None  # participants without a job have a reason and are not measured
        return self._job.request(what, self._index, *arguments)

    def _update(self, answer: Mapping[str, Any] | None) -> None:
        """Update the row from the ranks' copy, except for `LOCAL_FIELDS`."""
        if answer is None:
            self.row.reason = self._job.reason if self._job is not None else ""
        else:
            before, self.row = self.row, BenchmarkRow.from_json(answer)
            for name in LOCAL_FIELDS:
                setattr(self.row, name, getattr(before, name))
            self.row.parts |= before.parts
