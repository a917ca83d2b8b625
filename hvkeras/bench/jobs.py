"""The jobs of a benchmark: each engine has ranks of its own, which stand still while others are measured.

An engine's threads work even when nobody asks for a collective (Horovod's compares notes with the other ranks every
millisecond), and would take time from whatever is being timed. So the ranks of all jobs but one are stopped.
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

from hvkeras.bench.channel import Channel, ChannelClosedError, Exchange
from hvkeras.bench.row import Row

TICK = 0.1  # seconds between two looks at a job
LAST_WORDS = 20.0  # seconds that a job whose rank 0 is gone has to say why

# Kills the ranks it was told of when the benchmark is gone, however that ended: stopped ones see nothing by themselves.
_GUARD = """import os, signal, sys
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


Words = Callable[[str, int], str]  # why a job failed in one line, from its standard error and its exit code
End = Callable[["subprocess.Popen[bytes]"], None]


class TimeIsUpError(Exception):
    """The benchmark takes longer than it may."""


class Guard:
    """Makes sure that no stopped rank is left behind."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-E", "-c", _GUARD], stdin=subprocess.PIPE, text=True,
                                         start_new_session=True, stderr=subprocess.DEVNULL)

    def watch(self, pids: Sequence[int]) -> None:
        """Takes care of more ranks."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{pid}\n" for pid in pids))
        self._process.stdin.flush()

    def close(self) -> None:
        """Kills those that are still there."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Job:
    """The ranks that run one engine, started by a launcher.

    Args:
        folder: Where their output goes, and their plan lies.
        command: Starts them; it is followed by the folder.
        words: Says in one line why the job failed.
        end: Ends the process that `command` started.
        deadline: The time, of the monotonic clock, at which the benchmark must be over.
    """

    def __init__(self, folder: Path, command: Sequence[str], words: Words, end: End, deadline: float) -> None:
        self.folder = folder
        self._command, self._words, self._end_process, self._deadline = [*command, str(folder)], words, end, deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Channel | None = None
        self._pids: list[int] = []
        self.reason = ""

    def start(self, plan: Mapping[str, Any], environment: Mapping[str, str], guard: Guard) -> None:
        """Starts the ranks, and waits until they serve; then they stand still. If they fail, `reason` says why.

        Args:
            plan: What they are to do; `port` and `key` are added.
            environment: Their environment.
            guard: Told of their processes.

        Raises:
            TimeIsUpError: The benchmark takes too long.
        """
        self.folder.mkdir()
        exchange = Exchange()
        try:
            (self.folder / "plan.json").write_text(json.dumps({**plan, "port": exchange.port, "key": exchange.key}))
            with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as errors:
                self._process = subprocess.Popen(self._command, env=dict(environment), stdin=subprocess.DEVNULL,
                                                 stdout=out, stderr=errors, start_new_session=True)
            while self._line is None:
                if self._process.poll() is not None:
                    self._fail()
                    return
                self._check_time()
                self._line = exchange.accept(TICK)
        finally:
            exchange.close()
        try:
            self._pids = self._answer()
        except ChannelClosedError:
            self._fail()
            return
        guard.watch(self._pids)
        self._signal(signal.SIGSTOP)

    def ask(self, *request: Any) -> Any:
        """Has the ranks do something, and stand still again.

        Returns:
            What rank 0 answers; None if the job ended, and `reason` says why.

        Raises:
            TimeIsUpError: The benchmark takes too long.
        """
        if self.reason:
            return None
        assert self._line is not None
        try:
            with self._awake():
                self._line.send(request)
                return self._answer()
        except ChannelClosedError:
            self._fail()
            return None

    def close(self) -> None:
        """Ends the ranks in good order, or otherwise."""
        if self._process is None:
            return
        if self._line is not None and not self.reason:
            with contextlib.suppress(ChannelClosedError, TimeIsUpError):
                self._signal(signal.SIGCONT)
                self._line.send(["end"])
                self._await_exit()
        self._signal(signal.SIGCONT)
        self._end_process(self._process)
        if self._line is not None:
            self._line.close()

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
        assert self._line is not None
        while True:
            with contextlib.suppress(TimeoutError):
                return self._line.receive(TICK)
            self._check_time()

    def _fail(self) -> None:
        """Lets the job end, and finds out why it did."""
        assert self._process is not None
        self._signal(signal.SIGCONT)
        self._await_exit()
        self._end_process(self._process)
        self._pids = []
        text = (self.folder / "stderr").read_text(errors="replace")
        self.reason = f"{self._words(text, self._process.returncode)}; output of all ranks: {self.folder}"

    def _await_exit(self) -> None:
        assert self._process is not None
        end = time.monotonic() + LAST_WORDS
        while self._process.poll() is None and time.monotonic() < end:
            self._check_time()
            time.sleep(TICK)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeIsUpError


class Remote:
    """A participant in a job, as whoever calls the turns sees it. What fails becomes the reason in its row.

    Args:
        row: Its row.
        job: The job.
        place: Its place among the participants of that job.
    """

    def __init__(self, row: Row, job: Job | None, place: int) -> None:
        self.row, self._job, self._place = row, job, place

    def prepare(self) -> None:
        """Builds, traces, runs a first time, and verifies."""
        self._update(self._ask("prepare"))

    def timed(self, calls: int) -> float:
        """Runs a block, verifies what it left, and returns the mean seconds of a call."""
        answer = self._ask("time", calls)
        seconds, row = answer or (0.0, None)
        self._update(row)
        return float(seconds)

    def finish(self) -> None:
        """Verifies what can only be verified at the end."""
        self._update(self._ask("finish"))

    def _ask(self, what: str, *arguments: Any) -> Any:
        assert self._job is not None  # those without a job have a reason, and do not compete
        return self._job.ask(what, self._place, *arguments)

    def _update(self, told: Mapping[str, Any] | None) -> None:
        """Takes what the ranks know of the row; its blocks are kept here."""
        if told is None:
            self.row.reason = self._job.reason if self._job is not None else ""
        else:
            blocks, calls = self.row.blocks, self.row.calls
            self.row = Row.from_json(told)
            self.row.blocks, self.row.calls = blocks, calls
