"""Lines that all workers of a job print alike, such as the warnings of a script: only those of worker 0 are shown."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

DELAY = 1.0  # seconds for which a line waits for the same line of worker 0
REMEMBERED = 1000  # maximum number of different lines of worker 0
LONGEST = 4096  # bytes of a remembered line


class Echoes:
    """Lines of workers other than 0, without those that worker 0 has printed as well, a little earlier or later."""

    def __init__(self) -> None:
        self._said: OrderedDict[bytes, int] = OrderedDict()  # by worker 0, the oldest first
        self._heard: dict[int, Counter[bytes]] = {}  # those that each other worker has printed as well
        self._late: dict[int, deque[tuple[float, bytes]]] = {}  # lines that wait, and since when

    def add(self, worker: int, lines: list[bytes], now: float) -> None:
        """Add lines of a worker."""
        for line in lines:
            if worker:
                if not self._is_echo(worker, line):
                    self._late.setdefault(worker, deque()).append((now, line))
            elif len(line) <= LONGEST:
                self._said[line] = self._said.pop(line, 0) + 1
                if len(self._said) > REMEMBERED:
                    self._said.popitem(last=False)
        if not worker:
            for other, late in self._late.items():
                self._late[other] = deque(each for each in late if not self._is_echo(other, each[1]))

    def due(self, now: float) -> list[tuple[int, list[bytes]]]:
        """Return, and forget, the lines of each worker that need not wait any longer."""
        found = []
        for worker, late in self._late.items():
            lines = []
            while late and late[0][0] <= now - DELAY:
                lines.append(late.popleft()[1])
            if lines:
                found.append((worker, lines))
        return found

    def _is_echo(self, worker: int, line: bytes) -> bool:
        heard = self._heard.setdefault(worker, Counter())
        if self._said.get(line, 0) <= heard[line]:
            return False
        heard[line] += 1
        return True
