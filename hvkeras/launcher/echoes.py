"""Lines that all workers of a job print alike, such as the warnings of a script: only those of worker 0 are shown.

The memory for this is bounded. If a line is forgotten too early, it is shown again for another worker, and never lost.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

DELAY = 1.0  # seconds for which a line waits for the same line of worker 0
MIB = 1024 * 1024
REMEMBERED = 12 * MIB  # bytes of lines of worker 0
WAITING = 12 * MIB  # bytes of lines of all other workers that wait
LONGEST = 4096  # bytes of a remembered line
# Bytes of memory beside the text: for a remembered line, for each worker that has printed it, for a waiting line.
_PER_LINE, _PER_ECHO, _PER_WAITING = 400, 100, 300


class _Said:
    """A line of worker 0: how often that has printed it, and each other worker."""

    __slots__ = ("echoed", "times")

    def __init__(self) -> None:
        self.times = 0
        self.echoed: dict[int, int] = {}


class _Backlog:
    """Lines of another worker that wait, the oldest first, and those of them that worker 0 has printed meanwhile."""

    def __init__(self) -> None:
        self.lines: deque[tuple[float, bytes]] = deque()
        self._unmatched: Counter[bytes] = Counter()
        self._matched: Counter[bytes] = Counter()

    def add(self, line: bytes, now: float) -> None:
        self.lines.append((now, line))
        self._unmatched[line] += 1

    def match(self, line: bytes) -> bool:
        """Mark a line that worker 0 prints as well; return whether there was one."""
        if not self._unmatched[line]:  # a Counter adds no entry for this
            return False
        _count_down(self._unmatched, line)
        self._matched[line] += 1
        return True

    def pop(self) -> tuple[bytes, bool]:
        """Remove the oldest line; return it, and whether it is to be shown."""
        line = self.lines.popleft()[1]
        is_echo = self._matched[line] > 0
        _count_down(self._matched if is_echo else self._unmatched, line)
        return line, not is_echo


class Echoes:
    """Lines of workers other than 0, without those that worker 0 has printed as well, a little earlier or later."""

    def __init__(self) -> None:
        self._said: OrderedDict[bytes, _Said] = OrderedDict()  # by worker 0, the oldest first
        self._late: dict[int, _Backlog] = {}  # lines that wait
        self._remembered = self._waiting = 0  # bytes

    def add(self, worker: int, lines: list[bytes], now: float) -> list[bytes]:
        """Add lines of a worker; return its oldest ones that cannot wait any longer, as too many do."""
        for line in lines:
            if not worker:
                self._say(line)
            elif not self._is_echo(worker, line):
                self._late.setdefault(worker, _Backlog()).add(line, now)
                self._waiting += len(line) + _PER_WAITING
        return self._popped(worker, lambda _: self._waiting > WAITING) if worker in self._late else []

    def due(self, now: float) -> list[tuple[int, list[bytes]]]:
        """Return, and forget, the lines of each worker that need not wait any longer."""
        found = ((worker, self._popped(worker, lambda since: since <= now - DELAY)) for worker in self._late)
        return [(worker, lines) for worker, lines in found if lines]

    def _say(self, line: bytes) -> None:
        """Remember a line of worker 0, and find it in the backlogs of the others."""
        if len(line) > LONGEST:
            return
        said = self._said.pop(line, None)
        if said is None:
            said = _Said()
            self._remembered += len(line) + _PER_LINE
        said.times += 1
        self._said[line] = said
        for worker, backlog in self._late.items():
            if backlog.match(line):
                self._count_echo(said, worker)
        self._forget()

    def _is_echo(self, worker: int, line: bytes) -> bool:
        said = self._said.get(line)
        if said is None or said.echoed.get(worker, 0) >= said.times:
            return False
        self._count_echo(said, worker)
        self._forget()
        return True

    def _count_echo(self, said: _Said, worker: int) -> None:
        if worker not in said.echoed:
            self._remembered += _PER_ECHO
        said.echoed[worker] = said.echoed.get(worker, 0) + 1

    def _forget(self) -> None:
        """Forget the oldest lines of worker 0, with all that is known about their echoes."""
        while self._remembered > REMEMBERED:
            line, said = self._said.popitem(last=False)
            self._remembered -= len(line) + _PER_LINE + _PER_ECHO * len(said.echoed)

    def _popped(self, worker: int, must_go: Callable[[float], bool]) -> list[bytes]:
        """Remove the oldest waiting lines of a worker; return those of them that are no echoes."""
        backlog, shown = self._late[worker], []
        while backlog.lines and must_go(backlog.lines[0][0]):
            line, is_shown = backlog.pop()
            self._waiting -= len(line) + _PER_WAITING
            if is_shown:
                shown.append(line)
        return shown


def _count_down(counts: Counter[bytes], line: bytes) -> None:
    counts[line] -= 1
    if not counts[line]:
        del counts[line]
