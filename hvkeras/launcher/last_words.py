"""Last words of workers: their tracebacks and exit reports, which the exit report of the job shows once for all."""

from __future__ import annotations

import math
import re

DELAY = 5.0  # seconds after which a traceback is shown if its worker goes on; TensorFlow takes seconds to exit
LONGEST = 1000  # maximum number of lines of a worker that wait
MOST = 8 * 1024 * 1024  # maximum number of bytes of all workers' lines that wait
_PER_LINE = 64  # bytes of memory for a line beside the text
_TRACEBACK = b"Traceback (most recent call last):"
# The exit reports of `hvkeras.job.failure`.
_FAILED = re.compile(rb"hvkeras: rank \d+ on \S+ \(pid \d+\) .*; the job ends on all ranks$")
_ENDS = re.compile(rb"hvkeras: rank \d+ on \S+ ends because ")
_FAILED_TOO = re.compile(rb"hvkeras: rank \d+ on \S+ failed in the same way as rank ")


class LastWords:
    """Lines of standard error from a traceback or an exit report on; they wait, as the worker may end with them.

    Attributes:
        job_ends: Set when the job ends early: from then on, lines wait for its exit report.
    """

    def __init__(self) -> None:
        self.job_ends: bool = False
        self._waiting: dict[int, list[bytes]] = {}
        self._sizes: dict[int, int] = {}  # of these lines, in bytes of memory
        self._since: dict[int, float] = {}

    def add(self, worker: int, lines: list[bytes], now: float) -> list[bytes]:
        """Add lines of a worker; return those that need not wait."""
        if worker not in self._waiting:
            start = next((index for index, line in enumerate(lines) if line == _TRACEBACK or _is_report(line)),
                         len(lines))
            shown, lines = lines[:start], lines[start:]
        else:
            shown = []
        if lines:
            if worker not in self._waiting:
                self._since[worker] = now
            self._waiting.setdefault(worker, []).extend(lines)
            self._sizes[worker] = self._sizes.get(worker, 0) + sum(_PER_LINE + len(line) for line in lines)
            if len(self._waiting[worker]) > LONGEST or sum(self._sizes.values()) > MOST:
                shown += self._pop(worker)
        return shown

    def due(self, now: float) -> list[tuple[int, list[bytes]]]:
        """Return, and forget, the lines of each worker that need not wait any longer; with `math.inf`, all."""
        late = [worker for worker, since in self._since.items() if since <= now - DELAY and worker in self._waiting]
        if self.job_ends and now != math.inf:
            return []
        return [(worker, self._pop(worker)) for worker in late]

    def _pop(self, worker: int) -> list[bytes]:
        del self._sizes[worker]
        return self._waiting.pop(worker)

    def take(self, worker: int | None) -> tuple[list[bytes], list[int]]:
        """Forget what the exit report of the job says as well.

        Args:
            worker: The worker that failed first; None if none did.

        Returns:
            The traceback of a worker that is no rank (yet), and the other workers that failed in the same way.
        """
        first, alike = self._waiting.pop(worker, []) if worker is not None else [], []
        for other, lines in list(self._waiting.items()):
            if _FAILED_TOO.match(lines[-1]) or (first and _masked(first) == _masked(lines)):
                alike.append(other)
                del self._waiting[other]
            elif first and _masked(first).startswith(_masked(lines)):  # terminated while it printed the same
                del self._waiting[other]
            elif (end := _start_of_report(lines)) is not None and _ENDS.match(lines[end]):
                self._waiting[other] = lines[:end]
        report = _start_of_report(first)
        if worker is not None and report is not None:
            self._waiting[worker], first = first[:report], []
        return first, sorted(alike)


def _start_of_report(lines: list[bytes]) -> int | None:
    return next((index for index, line in enumerate(lines) if _is_report(line)), None)


def _is_report(line: bytes) -> bool:
    return any(pattern.match(line) is not None for pattern in (_FAILED, _ENDS, _FAILED_TOO))


def _masked(lines: list[bytes]) -> bytes:
    return re.sub(rb"\d", b"", b"\n".join(lines))
