"""Job of a comparison: `hvkeras run` as a process with a timeout, its files, and its progress display."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from hvkeras.host.console import in_notebook
from hvkeras.launcher.exit_report import root_cause
from hvkeras.launcher.limits import ends_with_parent


class ProgressDisplay:
    """Progress display in a terminal. On other consoles, only messages are printed.

    Args:
        console: The console to print to; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console: Console = console or Console(stderr=True, highlight=False, force_jupyter=False)
        self._status: Status | None = None

    def update(self, title: str, detail: str) -> None:
        """Show the progress in place of the last one.

        Args:
            title: The running job, and its duration.
            detail: The job's last output; truncated to fit the line.
        """
        if not self.console.is_terminal:
            return
        room = max(0, self.console.width - 6 - len(title))
        text = f"{escape(title)}  [dim]{escape(detail[:room])}[/dim]"
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def finish(self, title: str) -> None:
        """Replace the progress line with a final line."""
        if self._status is not None:
            self._status.stop()
            self._status = None
            self.say(title)

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, markup=False, soft_wrap=True)


class NotebookDisplay(ProgressDisplay):
    """Progress display in a notebook cell: one output, updated about once per second."""

    WIDTH = 99

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []  # final lines
        self._shown = ""
        self._display: Any = None

    def update(self, title: str, detail: str) -> None:
        """Show the progress and the last output when the title, which counts seconds, has changed."""
        if title != self._shown:
            self._shown = title
            self._show(f"{title}  {detail}"[:self.WIDTH])

    def finish(self, title: str) -> None:
        """Replace the progress line with a final line."""
        self._lines.append(title)
        self._show()

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def _show(self, *moving: str) -> None:
        from IPython.display import display

        content = {"text/plain": "\n".join([*self._lines, *moving])}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)


def progress_display() -> ProgressDisplay:
    """Return the progress display for the output of this process."""
    return NotebookDisplay() if in_notebook() else ProgressDisplay()


_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # and other terminal control sequences
TICK = 0.1  # seconds between two checks of a job
END_GRACE = 40.0  # seconds for `hvkeras run` to end its ranks on all hosts; it needs at most about 30

# Runs `hvkeras run` of this installation. `python -m` would search the current folder first.
_HVKERAS_RUN = """{ends_with_parent}
import sys
sys.path[:] = filter(None, sys.path)
from hvkeras.cli.main import main
sys.exit(main(["run", *sys.argv[1:]]))"""

@dataclass(frozen=True)
class Trial:
    """Job of a comparison.

    Attributes:
        name: The backend, or `ONE_PROCESS`.
        folder: Folder for its output and records.
        arguments: The arguments of `hvkeras run`.
        round: The round of this run, counted from 1.
    """

    name: str
    processes: int
    folder: Path
    arguments: Sequence[str]
    environment: Mapping[str, str]
    round: int = 1

    @property
    def records(self) -> Path:
        """Folder of its records."""
        return self.folder / "record"

    def text(self, stream: str) -> str:
        """Return the merged output of all ranks to `stdout` or `stderr`."""
        path = self.folder / stream
        return path.read_text(errors="replace") if path.is_file() else ""

    def printed(self) -> str:
        """Return the standard output of rank 0."""
        paths = self._of_rank_0()
        return paths[0].read_text(errors="replace") if paths else ""

    def last_line(self) -> str:
        """Return the last output line of rank 0, or the current state of its progress bar."""
        paths = self._of_rank_0()
        if not paths:
            return ""
        with paths[0].open("rb") as file:
            file.seek(max(0, paths[0].stat().st_size - 4096))
            text = _COLOURS.sub("", file.read().decode(errors="replace"))
        states = re.split(r"[\r\n\b]+", text)
        return next((state.strip() for state in reversed(states) if state.strip()), "")

    def _of_rank_0(self) -> list[Path]:
        return sorted(self.folder.glob("rank.*/stdout"))[:1]

    def clear(self) -> None:
        """Remove files of an earlier comparison from the folder."""
        shutil.rmtree(self.records, ignore_errors=True)
        for path in [*self.folder.glob("rank.*/std*"), self.folder / "stdout", self.folder / "stderr"]:
            path.unlink(missing_ok=True)

    def run(self, timeout: float, heading: str, display: ProgressDisplay, verbose: bool,
            expected: float | None = None) -> str:
        """Run the job to completion.

        Args:
            timeout: Timeout in seconds.
            heading: The beginning of its progress line.
            display: Display of the progress.
            verbose: Show the ranks' output instead of progress.
            expected: Estimated seconds of this and all later jobs, if known.

        Returns:
            Why it failed, or "".
        """
        self.clear()
        view = _Verbose(self, heading, display) if verbose else _Progress(self, heading, display, expected)
        try:
            return self.run_job(timeout, view.update)
        finally:
            view.close()

    def run_job(self, timeout: float, update: Callable[[float], None]) -> str:
        """Run the job to completion; subclasses may start their ranks in other ways.

        Args:
            timeout: Timeout in seconds.
            update: Function that is called periodically with the elapsed seconds.

        Returns:
            Why it failed, or "".
        """
        code = watch(hvkeras_run(self.arguments), self.environment, self.folder, timeout, update)
        if code is None:
            return timeout_message(timeout)
        return root_cause(self.text("stderr"), code) if code else ""


def watch(command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float,
          update: Callable[[float], None]) -> int | None:
    """Run the process of a job to completion. On a timeout or an exception, terminate the job.

    Args:
        folder: Folder of its output files `stdout` and `stderr`.
        timeout: Timeout in seconds.
        update: Function that is called every `TICK` seconds with the elapsed seconds.

    Returns:
        Its exit code; None after a timeout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / stream).open("wb")) for stream in ("stdout", "stderr")]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=files[0],
                                   stderr=files[1], start_new_session=True)
        stack.callback(end, process)
        while process.poll() is None:
            if time.monotonic() - begun > timeout:
                return None
            update(time.monotonic() - begun)
            time.sleep(TICK)
    return process.returncode


def hvkeras_run(arguments: Sequence[str]) -> list[str]:
    """Return the command line that starts `hvkeras run` of this installation."""
    return [sys.executable, "-c", _HVKERAS_RUN.format(ends_with_parent=ends_with_parent()), *arguments]


def timeout_message(timeout: float) -> str:
    """Return the failure of a job after a timeout."""
    return f"it was terminated after a timeout of {timeout:g} s: raise --timeout"


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a job if it is running. `hvkeras run`, or else its agents, end the ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:  # even after a second Ctrl-C
        process.kill()
        process.wait()


class _Progress:
    """Progress line, which is final when the job has ended."""

    def __init__(self, trial: Trial, heading: str, display: ProgressDisplay, expected: float | None) -> None:
        self._trial, self._heading, self._display, self._expected = trial, heading, display, expected
        self._seconds = 0.0
        display.update(heading, "")

    def update(self, seconds: float) -> None:
        self._seconds = seconds
        title = self._title()
        if self._expected is not None:
            title += f", about {minutes(max(0.0, self._expected - self._seconds))} left"
        self._display.update(title, self._trial.last_line())

    def close(self) -> None:
        self._display.finish(self._title())

    def _title(self) -> str:
        return f"{self._heading}  {minutes(self._seconds)}"


def minutes(seconds: float) -> str:
    """Format a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class _Verbose:
    """Output of the job as it arrives."""

    def __init__(self, trial: Trial, heading: str, display: ProgressDisplay) -> None:
        self._trial = trial
        self._shown = {"stdout": 0, "stderr": 0}
        display.say(heading)

    def update(self, _: float) -> None:
        for stream, shown in self._shown.items():
            with (self._trial.folder / stream).open("rb") as file:
                file.seek(shown)
                data = file.read()
            self._shown[stream] += len(data)
            target = getattr(sys, stream)
            target.write(data.decode(errors="replace"))
            target.flush()

    def close(self) -> None:
        self.update(0.0)
