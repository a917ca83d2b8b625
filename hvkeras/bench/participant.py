"""Benchmark participants, as seen by their own ranks, and interleaved rounds of short blocks.

By interleaving, a disturbance of the machine affects all participants equally.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvkeras.bench.jobs import Remote
from hvkeras.bench.ranks import BenchmarkRanks
from hvkeras.bench.row import BenchmarkRow
from hvkeras.errors import explain
from hvkeras.host.machine import resident_memory

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """Peak resident memory since this object was created; Linux only."""

    def __init__(self) -> None:
        self._before: int | None = None
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # freed memory would hide new allocations
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self._before = resident_memory("VmRSS")

    def rise(self) -> int | None:
        """Return the peak since creation minus the resident memory at creation, in bytes; None if unknown."""
        peak = resident_memory("VmHWM") if self._before is not None else None
        return None if peak is None or self._before is None else max(0, peak - self._before)


class Participant(abc.ABC):
    """Implementation under test, with a row for its results."""

    row: BenchmarkRow

    @abc.abstractmethod
    def prepare(self) -> None:
        """Build and trace the participant, run it once, and verify the result."""

    @abc.abstractmethod
    def run(self, calls: int) -> None:
        """Run the work `calls` times."""

    def run_part(self, part: str, calls: int) -> None:
        """Run a part of the work, one of `row.parts`, `calls` times.

        Raises:
            KeyError: The work has no such part.
        """
        raise KeyError(f"{calls} times {part!r}")

    @abc.abstractmethod
    def check(self) -> None:
        """Verify the result of `run`.

        Raises:
            WrongResultError: The result is wrong.
        """

    def digest(self) -> str:
        """Return a hash of the state that must be identical on all ranks after the last block; "" if there is none."""
        return ""


def prepare(one: Participant, ranks: BenchmarkRanks) -> None:
    """Prepare a participant on all ranks; store its memory use, or the cause of a failure, in its row."""
    def prepared() -> int | None:
        memory = PeakMemory()
        one.prepare()
        return memory.rise()

    rises, one.row.reason, one.row.wrong = ranks.run_on_all(prepared)
    known = [rise for rise in rises if rise is not None]
    one.row.memory = max(known) + (one.row.memory or 0) if known else None


def timed(one: Participant, calls: int, part: str, ranks: BenchmarkRanks) -> tuple[float, float]:
    """Run a block on all ranks, and verify its result.

    Args:
        calls: Number of calls in the block.
        part: Part of the work to run instead, or "".

    Returns:
        Mean seconds per call, and CPU seconds per call, summed over all ranks.
    """
    def run(calls: int) -> None:
        if part:
            one.run_part(part, calls)
        else:
            one.run(calls)

    def block() -> tuple[float, float]:
        run(1)  # not timed: synchronises the ranks, and warms the caches
        begun, busy = time.perf_counter(), time.process_time()
        run(calls)
        seconds, busy = time.perf_counter() - begun, time.process_time() - busy
        one.check()
        return seconds / calls, busy / calls

    found, one.row.reason, one.row.wrong = ranks.run_on_all(block)
    if one.row.reason:
        return 0.0, 0.0
    return sum(seconds for seconds, _ in found) / len(found), sum(busy for _, busy in found)


def finish(one: Participant, ranks: BenchmarkRanks) -> None:
    """Verify that all ranks have the same state; store a difference in the row."""
    digests, one.row.reason, one.row.wrong = ranks.run_on_all(one.digest)
    if one.row.reason:
        return
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        one.row.wrong = True
        one.row.reason = explain("All ranks must hold the same weights after training", engine=one.row.name,
                                 model=one.row.work, differs=f"rank {others[0]} from rank 0")


FEWEST, MOST = 5, 200  # rounds, unless the user sets the number


@dataclass(frozen=True)
class Effort:
    """Duration of a measurement.

    Attributes:
        seconds: Total seconds for all participants on one piece of work.
        rounds: Number of rounds instead of `seconds`, or None.
        block: Target seconds of a block, which has at least one call.
    """

    seconds: float
    rounds: int | None
    block: float


def run_rounds(participants: Sequence[Remote], effort: Effort, show: Callable[[float, str], None]) -> None:
    """Measure participants in interleaved rounds, without those that have failed, whose rows have the reason.

    Args:
        participants: The participants; those with a reason in their row are skipped.
        effort: Duration of the measurement.
        show: Called with the completed fraction and the current activity.
    """
    left = _left(participants)
    for index, one in enumerate(left):
        show(0.3 * index / len(left), f"{one.row.work}: {one.row.name} is warming up")
        one.prepare()
    left = _left(left)
    costs = {id(one): _cost(one, effort.block) for one in left}
    left = _left(left)
    rounds = effort.rounds or _rounds(effort.seconds, sum(costs[id(one)] for one in left))
    for number in range(rounds):
        turn = number % max(1, len(left))  # rotate the order
        for index, one in enumerate(left[turn:] + left[:turn]):
            share = (number + index / len(left)) / rounds
            show(0.3 + 0.7 * share, f"{one.row.work}: {one.row.name}, round {number + 1} of {rounds}")
            seconds, busy = one.timed(one.row.calls)
            one.row.blocks.append(seconds / one.row.links)
            one.row.busy.append(busy / one.row.links)
            for part in [] if one.row.reason else list(one.row.parts):
                seconds, _ = one.timed(one.row.calls, part)
                one.row.parts[part].append(seconds)
        left = _left(left)
    for one in left:
        one.finish()
    for one in participants:
        if one.row.reason:
            one.row.blocks, one.row.busy, one.row.parts = [], [], {}


def _left(participants: Sequence[Remote]) -> list[Remote]:
    return [one for one in participants if not one.row.reason]


def _cost(one: Remote, block: float) -> float:
    """Set the number of calls per block, and return the approximate seconds of a block."""
    seconds, _ = one.timed(1)
    one.row.calls = max(1, math.ceil(block / seconds)) if seconds else 1
    return (seconds + sum(one.timed(1, part)[0] for part in list(one.row.parts))) * (one.row.calls + 1)


def _rounds(seconds: float, cost: float) -> int:
    return max(FEWEST, min(MOST, int(seconds / cost))) if cost else FEWEST
