"""Contestants that take turns in many short blocks, so that whatever disturbs the machine disturbs all alike."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvkeras.bench.memory import PeakMemory
from hvkeras.bench.ranks import Ranks
from hvkeras.bench.row import Row

FEWEST, MOST = 5, 200  # rounds, unless the user says how many


class Contestant(abc.ABC):
    """Something whose speed is measured.

    Attributes:
        row: What is known of it, and will be.
        alone: Whether rank 0 runs it while the others are idle.
    """

    row: Row
    alone = False

    @abc.abstractmethod
    def prepare(self) -> None:
        """Builds, traces, runs a first time, and verifies; called by all ranks that take part."""

    def accompany(self) -> None:  # noqa: B027  # most have nothing to do
        """Called instead of `prepare` on the ranks that do not take part."""

    @abc.abstractmethod
    def run(self, calls: int) -> None:
        """Does the work so many times."""

    @abc.abstractmethod
    def check(self) -> None:
        """Verifies what `run` left.

        Raises:
            WrongResultError: It is not what NumPy computes.
        """


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: Seconds for all contestants on one piece of work, together.
        rounds: How many rounds instead, or None.
        block: Seconds that a block should take, if it has several calls.
    """

    seconds: float
    rounds: int | None
    block: float


def compete(contestants: Sequence[Contestant], ranks: Ranks, effort: Effort,
            show: Callable[[float, str], None]) -> None:
    """Lets contestants take turns until their time is up; who fails leaves the contest with the reason in its row.

    Args:
        contestants: Who takes part; the same on all ranks. Those with a reason in their row do not.
        ranks: The ranks.
        effort: How long to measure.
        show: Told what share is done, and what is being done.
    """
    left = [one for one in contestants if not one.row.reason]
    for place, one in enumerate(left):
        show(0.3 * place / len(left), f"{one.row.work}: {one.row.name} warms up")
        _prepare(one, ranks)
    left = [one for one in left if not one.row.reason]
    costs = {id(one): _cost(one, ranks, effort.block) for one in left}
    left = [one for one in left if not one.row.reason]
    rounds = effort.rounds or _rounds(effort.seconds, sum(costs[id(one)] for one in left))
    for number in range(rounds):
        turn = number % max(1, len(left))  # nobody always follows the same one
        for place, one in enumerate(left[turn:] + left[:turn]):
            share = (number + place / len(left)) / rounds
            show(0.3 + 0.7 * share, f"{one.row.work}: {one.row.name}, round {number + 1} of {rounds}")
            _block(one, ranks)
        left = [one for one in left if not one.row.reason]


def _taking_part(one: Contestant, ranks: Ranks) -> bool:
    return ranks.rank == 0 or not one.alone


def _fail(one: Contestant, reason: str, wrong: bool) -> None:
    if reason:
        one.row.reason, one.row.wrong, one.row.blocks = reason, wrong, []


def _prepare(one: Contestant, ranks: Ranks) -> None:
    def prepared() -> int | None:
        if not _taking_part(one, ranks):
            one.accompany()
            return None
        memory = PeakMemory()
        one.prepare()
        return memory.rise()

    rises, reason, wrong = ranks.together(prepared)
    _fail(one, reason, wrong)
    known = [rise for rise in rises if rise is not None]
    one.row.memory = max(known) + (one.row.memory or 0) if known else None


def _cost(one: Contestant, ranks: Ranks, block: float) -> float:
    """Fixes how many calls a block has, and returns about how many seconds it takes."""
    one.row.calls = 1
    seconds = _timed(one, ranks)
    one.row.calls = max(1, math.ceil(block / seconds)) if seconds else 1
    return seconds * (one.row.calls + 1)


def _rounds(seconds: float, cost: float) -> int:
    return max(FEWEST, min(MOST, int(seconds / cost))) if cost else FEWEST


def _block(one: Contestant, ranks: Ranks) -> None:
    seconds = _timed(one, ranks)
    if not one.row.reason:
        one.row.blocks.append(seconds / one.row.links)


def _timed(one: Contestant, ranks: Ranks) -> float:
    """Runs a block, verifies what it left, and returns the mean seconds of a call."""
    def block() -> float | None:
        if not _taking_part(one, ranks):
            return None
        one.run(1)  # not timed: aligns the ranks, and brings back what other contestants threw out of the caches
        begun = time.perf_counter()
        one.run(one.row.calls)
        seconds = (time.perf_counter() - begun) / one.row.calls
        one.check()
        return seconds

    told, reason, wrong = ranks.together(block)
    _fail(one, reason, wrong)
    seconds = [each for each in told if each is not None]
    return sum(seconds) / len(seconds) if seconds and not reason else 0.0
