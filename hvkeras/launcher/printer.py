"""Printer of the workers' output: line by line, each line prefixed with its worker's number.

The number is the rank, unless the ranks of an elastic job have changed. Only complete lines are shown, so that a line
never mixes the output of two workers. If standard output is a terminal, worker 0's unfinished line is shown at the
bottom, so that its progress bar moves. A line of another worker pushes it down. In a file, a line that was redrawn with
carriage returns appears in its final state.

On the screen, the traceback that ends a worker, and its exit report, wait for the exit report of the job, which repeats
that of the worker that failed first (`LastWords`).

The memory for buffered output is bounded for all workers together: 64 MiB, with that of `Echoes` and `LastWords`. So is
the number of open files.
"""

from __future__ import annotations

import contextlib
import errno
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hvkeras.errors import MachineError, explain
from hvkeras.host.files import room_left
from hvkeras.launcher.echoes import Echoes
from hvkeras.launcher.last_words import LastWords

# Lines that TensorFlow prints while it loads, before it has read any log level.
CHATTER = re.compile(r"I\d{4} \d\d:\d\d:|WARNING: All log messages before absl::|To enable the following instr")
_CHATTER = re.compile(CHATTER.pattern.encode())
KIB, MIB = 1024, 1024 * 1024
TAIL, TAILS = 64 * KIB, 16 * MIB  # bytes of standard error stored for the exit report: per worker, and in all
LONGEST_LINE = MIB  # bytes after which an unfinished line is shown
UNFINISHED = 16 * MIB  # total bytes of unfinished lines
LEAST = 4 * KIB  # minimum bytes of a tail or an unfinished line, for any number of workers
OPEN_FILES = 256  # maximum number of open output files
CLEAR = b"\r\x1b[K"
_GONE_ERRNOS = (errno.EIO, errno.ENXIO, errno.EBADF)  # the pipe or terminal was closed
_STREAM_NAMES = {"stdout": "output", "stderr": "error"}


class Printer:
    """Output to the screen and, with `--output-filename`, to one file per worker and stream.

    Args:
        stdout: Stream for the workers' standard output.
        stderr: Stream for the workers' standard error.
        live: Whether `stdout` is a terminal, where worker 0's unfinished line is shown.
        timestamps: Prefix lines with the time.
        quiet: Omit TensorFlow's startup lines on the screen, but not in files.
        folder: Folder for `rank.<n>/stdout` and `rank.<n>/stderr`; None for no files.
        append: Append to existing files.
        as_one: Show the output as that of one process: worker 0's without a number, and of the others only lines of
            standard error that differ from its own.
        reports_failures: Whether an exit report of the job follows, for which the last words of workers wait.
        clock: Function that returns the time in seconds since the epoch.

    Attributes:
        last_words: The last words of workers, with `reports_failures`.
    """

    def __init__(self, size: int, stdout: BinaryIO, stderr: BinaryIO, live: bool = False, timestamps: bool = False,
                 quiet: bool = False, folder: Path | None = None, append: bool = False, as_one: bool = False,
                 reports_failures: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._screens = {"stdout": stdout, "stderr": stderr}
        self._live = live
        self._timestamps = timestamps
        self._quiet = quiet
        self._as_one, self._echoes, self._has_said = as_one, Echoes(), False
        self.last_words: LastWords | None = LastWords() if reports_failures else None
        self._clock = clock
        self._unfinished: dict[tuple[int, str], bytes] = {}
        self._open_screens = set(self._screens)  # a stream that is closed or full raises once, and is then unused
        self._shown = b""  # the unfinished line at the bottom of the terminal
        self._tails: dict[int, bytearray] = {}
        self._paths: dict[tuple[int, str], Path] = {}  # of writable files
        self._files: dict[tuple[int, str], BinaryIO] = {}  # open files, the least recently used first
        self._folder, self._width, self._mode = folder, len(str(size - 1)), "ab" if append else "wb"
        self._workers = size
        for worker in range(size):
            self.open_files(worker)

    def open_files(self, worker: int) -> None:
        """Create the output files of a worker if there is a folder.

        Raises:
            OSError: A file cannot be created.
        """
        if self._folder is None:
            return
        index = self._folder / f"rank.{worker:0{self._width}}"
        index.mkdir(parents=True, exist_ok=True)
        for stream in self._screens:
            path = index / stream
            path.open(self._mode).close()
            self._paths[worker, stream] = path

    def show(self, worker: int, stream: str, data: bytes) -> None:
        """Show the output of a worker.

        Args:
            stream: `stdout` or `stderr`.
            data: The bytes, which may end in the middle of a line.

        Raises:
            OSError: The screen was closed (pipe or terminal); later calls only write the files.
            MachineError: A file or redirected stream cannot be written, as the disk is full, for example.
        """
        self._workers = max(self._workers, worker + 1)
        if (worker, stream) in self._paths:
            self._write_to_file(worker, stream, data)
        if stream == "stderr":
            tail, longest = self._tails.setdefault(worker, bytearray()), self._share(TAIL, TAILS)
            tail += data[-longest:]
            del tail[:-longest]
        elif self._as_one and worker:
            return
        *lines, rest = (self._unfinished.get((worker, stream), b"") + data).split(b"\n")
        # A carriage return at the very end takes effect only with the text that follows it.
        rest = _final_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > self._share(LONGEST_LINE, UNFINISHED // len(self._screens)):
            lines, rest = [*lines, rest], b""
        self._unfinished[worker, stream] = rest
        if self._quiet and stream == "stderr":
            lines = [line for line in lines if not _CHATTER.match(line)]
        if stream == "stderr" and self.last_words is not None:
            lines = self.last_words.add(worker, lines, self._clock())
        self._print_first(worker, stream, lines)
        if self._live and worker == 0 and stream == "stdout":
            self._show_unfinished()

    def show_late(self, all_lines: bool = False) -> None:
        """Show the lines that have waited for the same line of worker 0, or for a failure; called periodically."""
        now = math.inf if all_lines else self._clock()
        for worker, lines in () if self.last_words is None else self.last_words.due(now):
            self._print_first(worker, "stderr", lines)
        for worker, lines in self._echoes.due(now):
            self._print_lines(worker, "stderr", lines)

    def _print_first(self, worker: int, stream: str, lines: list[bytes]) -> None:
        """Print lines; with `as_one`, those of standard error that worker 0 does not print as well."""
        if self._as_one and stream == "stderr":
            lines = [_final_state(line) for line in lines]
            hurried = self._echoes.add(worker, lines, self._clock())
            if hurried and not self._has_said:
                self._has_said = True
                self.say("hvkeras run: ranks print more lines than can be compared: from here on, lines that they have"
                         " in common may be shown more than once")
            lines = hurried if worker else lines
        self._print_lines(worker, stream, lines)

    def _print_lines(self, worker: int, stream: str, lines: list[bytes]) -> None:
        if lines:
            prefix = self._prefix(worker)
            self._print(stream, b"".join(prefix + _final_state(line) + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """Print the launcher's own text to standard error."""
        self._print("stderr", "".join(f"{line}\n" for line in text.splitlines()).encode())

    def tail(self, worker: int) -> str:
        """Return the end of a worker's standard error."""
        return bytes(self._tails.get(worker, b"")).decode(errors="replace")

    def finish(self) -> None:
        """Show the remaining unfinished lines, and close the files."""
        self.show_late(all_lines=True)
        for (worker, stream), text in sorted(self._unfinished.items()):
            if text:
                self._print(stream, self._prefix(worker) + _final_state(text) + b"\n", redraw=False)
        self._unfinished.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._paths.clear()

    def _share(self, most: int, of_all: int) -> int:
        return max(LEAST, min(most, of_all // self._workers))

    def _prefix(self, worker: int) -> bytes:
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(self._clock())) if self._timestamps else ""
        number = "" if self._as_one and not worker else f"[{worker}] "
        return f"{timestamp}{number}".encode()

    def _print(self, stream: str, text: bytes, redraw: bool = True) -> None:
        if self._shown:
            self._write("stdout", CLEAR)
            self._shown = b""
        self._write(stream, text)
        if self._live and redraw:
            self._show_unfinished()

    def _show_unfinished(self) -> None:
        text = _final_state(self._unfinished.get((0, "stdout"), b""))
        line = self._prefix(0) + text if text else b""
        if line != self._shown:
            self._write("stdout", CLEAR + line if self._shown or line else b"")
            self._shown = line

    def _write(self, stream: str, data: bytes) -> None:
        if stream in self._open_screens:
            try:
                self._screens[stream].write(data)
                self._screens[stream].flush()
            except OSError as error:
                if isinstance(error, BrokenPipeError) or error.errno in _GONE_ERRNOS:
                    self._open_screens.clear()
                    raise
                self._open_screens.discard(stream)
                raise MachineError(explain(f"Standard {_STREAM_NAMES[stream]} must be writable ({error.strerror})",
                                           "free space, or redirect it")) from error

    def _write_to_file(self, worker: int, stream: str, data: bytes) -> None:
        """Write all data to a worker's file. When the disk fills up, a first write may be partial."""
        key, rest = (worker, stream), memoryview(data)
        try:
            file: Any = self._files.pop(key, None) or self._paths[key].open("ab", buffering=0)
            self._files[key] = file
            while rest:
                rest = rest[file.write(rest):]
            if len(self._files) > OPEN_FILES:
                key = next(iter(self._files))  # so that an error of close() names this file
                self._files.pop(key).close()
        except OSError as error:
            path, opened, size = self._paths.pop(key), self._files.pop(key, None), 0
            with contextlib.suppress(OSError):
                size = path.stat().st_size
            if opened is not None:
                with contextlib.suppress(OSError):
                    opened.close()
            raise MachineError(explain(f"The files of the ranks' output must be writable ({error.strerror})",
                                       "free space, or choose another --output-filename", path=str(path), size=size,
                                       room_left=room_left(path))) from error


def files_kept_open(workers: int) -> int:
    """Return the maximum number of open output files for a number of workers."""
    return min(2 * workers, OPEN_FILES + 1)


def _final_state(line: bytes) -> bytes:
    r"""Return the final state of a line with carriage returns: the last non-empty text between them.

    Backspaces before a carriage return, as in Keras's progress bar, are ignored.
    """
    if b"\r" not in line and b"\b" not in line:
        return line
    states = [state for state in (part.strip(b"\b") for part in line.split(b"\r")) if state]
    return states[-1] if states else b""
