"""What takes part in a benchmark, as its own ranks see it."""

from __future__ import annotations

import abc
import time

from hvkeras.bench.memory import PeakMemory
from hvkeras.bench.ranks import Ranks
from hvkeras.bench.row import Row


class Contestant(abc.ABC):
    """Something whose speed is measured.

    Attributes:
        row: What is known of it, and will be.
    """

    row: Row

    @abc.abstractmethod
    def prepare(self) -> None:
        """Builds, traces, runs a first time, and verifies."""

    @abc.abstractmethod
    def run(self, calls: int) -> None:
        """Does the work so many times."""

    @abc.abstractmethod
    def check(self) -> None:
        """Verifies what `run` left.

        Raises:
            WrongResultError: It is not what NumPy computes.
        """

    def finish(self, ranks: Ranks) -> None:  # noqa: B027  # most have nothing more to verify
        """Verifies what only all ranks together can, after the last block.

        Raises:
            WrongResultError: It is wrong.
        """


def prepare(one: Contestant, ranks: Ranks) -> None:
    """Prepares a contestant on all ranks; why that failed, and the memory it took, go into its row."""
    def prepared() -> int | None:
        memory = PeakMemory()
        one.prepare()
        return memory.rise()

    rises, one.row.reason, one.row.wrong = ranks.together(prepared)
    known = [rise for rise in rises if rise is not None]
    one.row.memory = max(known) + (one.row.memory or 0) if known else None


def timed(one: Contestant, calls: int, ranks: Ranks) -> float:
    """Runs a block on all ranks, verifies what it left, and returns the mean seconds of a call."""
    def block() -> float:
        one.run(1)  # not timed: aligns the ranks, and brings back what others threw out of the caches
        begun = time.perf_counter()
        one.run(calls)
        seconds = (time.perf_counter() - begun) / calls
        one.check()
        return seconds

    told, one.row.reason, one.row.wrong = ranks.together(block)
    return 0.0 if one.row.reason else float(sum(told) / len(told))


def finish(one: Contestant, ranks: Ranks) -> None:
    """Has a contestant verify the rest."""
    _, one.row.reason, one.row.wrong = ranks.together(lambda: one.finish(ranks))
