"""Child process whose output is shown on `sys.stdout` and `sys.stderr`: in a notebook, in the cell."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hvkeras.host.console import in_notebook
from hvkeras.launcher.agent import terminal
from hvkeras.launcher.printer import CLEAR, TAIL

ERASE = CLEAR.decode()
END_TIMEOUT = 30.0  # seconds after an interrupt within which the launcher must end its ranks


class StreamedProcess:
    """Launcher as a child process. In a terminal or a notebook, rank 0's progress bar moves.

    Args:
        environment: Its environment variables; by default, those of this process.
        streams: Text streams for its standard output and error, where None is `sys.stdout` or `sys.stderr`; or None to
            show nothing.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None,
                 streams: tuple[Any, Any] | None = (None, None)) -> None:
        live = streams == (None, None) and (sys.stdout.isatty() or in_notebook())
        out, err = (None, None) if streams is None else (streams[0] or sys.stdout, streams[1] or sys.stderr)
        size = shutil.get_terminal_size((100, 40))
        self._output, theirs = terminal([size.columns, size.lines]) if live else os.pipe()
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE,
                                             env=None if environment is None else dict(environment))
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
        assert self._process.stderr is not None
        self._last = bytearray()
        self._readers = [
            threading.Thread(target=_show, args=(self._output, out, bytearray()), name="hvkeras-run-stdout"),
            threading.Thread(target=_show, args=(self._process.stderr.fileno(), err, self._last),
                             name="hvkeras-run-stderr")]
        for reader in self._readers:
            reader.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, at most the given seconds; return whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def interrupt(self) -> None:
        """Interrupt it, as Ctrl-C does, and wait for its end."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT)
        self._process.kill()

    def finish(self) -> tuple[int, str]:
        """Release its resources after its end; return its exit code, and the end of its standard error."""
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        os.close(self._output)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code, self._last.decode(errors="replace")


def _show(source: int, target: Any, last: bytearray) -> None:
    """Copy the source to the target as data arrives, and store the end of it in `last`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    clear = "\r" + 99 * " " + "\r" if in_notebook() else ERASE  # a cell has no other way to clear a line
    while data := _read(source):
        if target is not None:
            target.write(decoder.decode(data).replace(ERASE, clear))
            if hasattr(target, "flush"):
                target.flush()
        last += data
        del last[:-TAIL]


def _read(source: int) -> bytes:
    """Return the next bytes; b"" at the end, which a terminal reports as EIO."""
    try:
        return os.read(source, TAIL)
    except OSError:
        return b""
