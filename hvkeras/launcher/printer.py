"""Shows the workers' output on one screen, line by line, each line prefixed with its worker's number.

That is the rank, unless the ranks of an elastic job have changed. Only complete lines are shown, so that a line never
mixes the output of two workers. If standard output is a terminal, worker 0's unfinished line is also shown, at the
bottom, so that its progress bar moves; a line of another worker pushes it down. In a file, a line that was redrawn with
carriage returns appears in its final state.

What is kept of the output in memory is bounded for all workers together, and so is the number of open files.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hvkeras.errors import MachineError, explain
from hvkeras.host.files import room_left

# What TensorFlow prints about itself while it loads, before it has read any log level.
CHATTER = re.compile(r"I\d{4} \d\d:\d\d:|WARNING: All log messages before absl::|To enable the following instr")
_CHATTER = re.compile(CHATTER.pattern.encode())
KIB, MIB = 1024, 1024 * 1024
TAIL, TAILS = 64 * KIB, 32 * MIB  # bytes of each worker's standard error that are kept for the exit report, and of all
LONGEST_LINE = MIB  # bytes after which a line is shown although it is unfinished
UNFINISHED = 64 * MIB  # bytes of the unfinished lines of all workers
LEAST = 4 * KIB  # bytes of a tail or an unfinished line, however many workers there are
OPEN_FILES = 256  # open at a time, of those that keep output
CLEAR = b"\r\x1b[K"
_GONE_ERRNOS = (errno.EIO, errno.ENXIO, errno.EBADF)  # a pipe or terminal that nobody reads any more
_STREAM_NAMES = {"stdout": "output", "stderr": "error"}


class Printer:
    """The screen and, with `--output-filename`, one file for each worker and stream.

    Args:
        size: The number of workers that there are at first.
        stdout: Where the workers' standard output goes.
        stderr: Where the workers' standard error goes.
        live: Whether worker 0's unfinished line is shown, as it is when `stdout` is a terminal.
        timestamps: Whether lines begin with the time.
        quiet: Whether TensorFlow's lines about itself are left out on the screen; the files always have them.
        folder: Where `rank.<n>/stdout` and `rank.<n>/stderr` go, or None.
        append: Whether output is appended to existing files.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(self, size: int, stdout: BinaryIO, stderr: BinaryIO, live: bool = False, timestamps: bool = False,
                 quiet: bool = False, folder: Path | None = None, append: bool = False,
                 clock: Callable[[], float] = time.time) -> None:
        self._screens = {"stdout": stdout, "stderr": stderr}
        self._live = live
        self._timestamps = timestamps
        self._quiet = quiet
        self._clock = clock
        self._unfinished: dict[tuple[int, str], bytes] = {}
        self._open_screens = set(self._screens)  # a stream that is closed or full raises once, and is unused after that
        self._shown = b""  # the unfinished line at the bottom of the terminal
        self._tails: dict[int, bytearray] = {}
        self._paths: dict[tuple[int, str], Path] = {}  # of files that can be written
        self._files: dict[tuple[int, str], BinaryIO] = {}  # those that are open, the least recently used first
        self._folder, self._width, self._mode = folder, len(str(size - 1)), "ab" if append else "wb"
        self._workers = size
        for worker in range(size):
            self.open_files(worker)

    def open_files(self, worker: int) -> None:
        """Creates the files of a worker, if there are to be any.

        Raises:
            OSError: They cannot be written.
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
        """Shows the output of a worker.

        Args:
            worker: Its number.
            stream: `stdout` or `stderr`.
            data: The bytes, which may end in the middle of a line.

        Raises:
            OSError: The screen is gone (a closed pipe or terminal); later calls write only the files.
            MachineError: The disk is full, or cannot be written to for another reason.
        """
        self._workers = max(self._workers, worker + 1)
        if (worker, stream) in self._paths:
            self._write_to_file(worker, stream, data)
        if stream == "stderr":
            tail, longest = self._tails.setdefault(worker, bytearray()), self._share(TAIL, TAILS)
            tail += data[-longest:]
            del tail[:-longest]
        *lines, rest = (self._unfinished.get((worker, stream), b"") + data).split(b"\n")
        # A carriage return at the very end takes effect only with the text that follows it.
        rest = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > self._share(LONGEST_LINE, UNFINISHED // len(self._screens)):
            lines, rest = [*lines, rest], b""
        self._unfinished[worker, stream] = rest
        if self._quiet and stream == "stderr":
            lines = [line for line in lines if not _CHATTER.match(line)]
        if lines:
            prefix = self._prefix(worker)
            self._print(stream, b"".join(prefix + _last_state(line) + b"\n" for line in lines))
        if self._live and worker == 0 and stream == "stdout":
            self._show_unfinished()

    def say(self, text: str) -> None:
        """Prints the launcher's own lines to standard error."""
        self._print("stderr", "".join(f"{line}\n" for line in text.splitlines()).encode())

    def tail(self, worker: int) -> str:
        """Returns the end of a worker's standard error."""
        return bytes(self._tails.get(worker, b"")).decode(errors="replace")

    def finish(self) -> None:
        """Shows lines that were never completed, and closes the files."""
        for (worker, stream), text in sorted(self._unfinished.items()):
            if text:
                self._print(stream, self._prefix(worker) + _last_state(text) + b"\n", keep_unfinished=False)
        self._unfinished.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._paths.clear()

    def _share(self, most: int, of_all: int) -> int:
        """Returns how many bytes of each worker are kept."""
        return max(LEAST, min(most, of_all // self._workers))

    def _prefix(self, worker: int) -> bytes:
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(self._clock())) if self._timestamps else ""
        return f"{timestamp}[{worker}] ".encode()

    def _print(self, stream: str, text: bytes, keep_unfinished: bool = True) -> None:
        if self._shown:
            self._write("stdout", CLEAR)
            self._shown = b""
        self._write(stream, text)
        if self._live and keep_unfinished:
            self._show_unfinished()

    def _show_unfinished(self) -> None:
        text = _last_state(self._unfinished.get((0, "stdout"), b""))
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
        """Writes all of the data to a worker's file; when the disk fills up, a write may store only a part at first."""
        key, rest = (worker, stream), memoryview(data)
        try:
            file: Any = self._files.pop(key, None) or self._paths[key].open("ab", buffering=0)
            self._files[key] = file
            while rest:
                rest = rest[file.write(rest):]
            if len(self._files) > OPEN_FILES:
                key = next(iter(self._files))  # so that an error of its close names this file
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
    """Returns how many of the files that keep the output of workers are open at a time."""
    return min(2 * workers, OPEN_FILES + 1)


def _last_state(line: bytes) -> bytes:
    r"""Returns what a line looks like after its carriage returns: the last text between them that is not empty.

    Backspaces before a carriage return, which Keras's progress bar prints, are part of the redrawing.
    """
    if b"\r" not in line and b"\b" not in line:
        return line
    states = [state for state in (part.strip(b"\b") for part in line.split(b"\r")) if state]
    return states[-1] if states else b""
