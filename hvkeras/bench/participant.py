"""Benchmark participants, as seen by their own ranks."""

from __future__ import annotations

import abc
import time

from hvkeras.bench.memory import PeakMemory
from hvkeras.bench.ranks import Ranks
from hvkeras.bench.row import Row
from hvkeras.errors import explain


class Participant(abc.ABC):
    """An implementation under test.

    Attributes:
        row: Its results.
    """

    row: Row

    @abc.abstractmethod
    def prepare(self) -> None:
        """Builds and traces the participant, runs it once, and verifies the result."""

    @abc.abstractmethod
    def run(self, calls: int) -> None:
        """Does the work `calls` times."""

    def run_part(self, part: str, calls: int) -> None:
        """Does a part of the work, one of `row.parts`, `calls` times.

        Raises:
            KeyError: The work has no such part.
        """
        raise KeyError(f"{calls} times {part!r}")

    @abc.abstractmethod
    def check(self) -> None:
        """Verifies the result of `run`.

        Raises:
            WrongResultError: The result is wrong.
        """

    def digest(self) -> str:
        """A hash of the state that must be identical on all ranks after the last block; "" if there is none."""
        return ""


def prepare(one: Participant, ranks: Ranks) -> None:
    """Prepares a participant on all ranks; the cause of a failure and the memory used go into its row."""
    def prepared() -> int | None:
        memory = PeakMemory()
        one.prepare()
        return memory.rise()

    rises, one.row.reason, one.row.wrong = ranks.run_on_all(prepared)
    known = [rise for rise in rises if rise is not None]
    one.row.memory = max(known) + (one.row.memory or 0) if known else None


def timed(one: Participant, calls: int, part: str, ranks: Ranks) -> tuple[float, float]:
    """Runs a block on all ranks, and verifies its result.

    Args:
        one: The participant.
        calls: How often its work is done.
        part: The part of the work to do instead, or "".
        ranks: The ranks.

    Returns:
        The mean seconds per call, and the seconds of the processor that all ranks together took for a call.
    """
    def run(calls: int) -> None:
        if part:
            one.run_part(part, calls)
        else:
            one.run(calls)

    def block() -> tuple[float, float]:
        run(1)  # not timed: aligns the ranks, and refills the caches that others evicted
        begun, busy = time.perf_counter(), time.process_time()
        run(calls)
        seconds, busy = time.perf_counter() - begun, time.process_time() - busy
        one.check()
        return seconds / calls, busy / calls

    found, one.row.reason, one.row.wrong = ranks.run_on_all(block)
    if one.row.reason:
        return 0.0, 0.0
    return sum(seconds for seconds, _ in found) / len(found), sum(busy for _, busy in found)


def finish(one: Participant, ranks: Ranks) -> None:
    """Verifies that all ranks hold the same state; a difference goes into the row."""
    digests, one.row.reason, one.row.wrong = ranks.run_on_all(one.digest)
    if one.row.reason:
        return
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        one.row.wrong = True
        one.row.reason = explain("All ranks must hold the same weights after training", engine=one.row.name,
                                 model=one.row.work, differs=f"rank {others[0]} from rank 0")
