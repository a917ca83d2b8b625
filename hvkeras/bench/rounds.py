"""Measures participants in turns, in many short blocks, so that disturbances of the machine affect all alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvkeras.bench.jobs import Remote

FEWEST, MOST = 5, 200  # rounds, unless the user sets the number


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: Total seconds for all participants on one piece of work.
        rounds: The number of rounds to run instead, or None.
        block: Seconds that a block should take; it has at least one call.
    """

    seconds: float
    rounds: int | None
    block: float


def run_rounds(participants: Sequence[Remote], effort: Effort, show: Callable[[float, str], None]) -> None:
    """Measures participants in turns until the time is up; one that fails drops out, with the reason in its row.

    Args:
        participants: The participants. Those with a reason in their row are skipped.
        effort: How long to measure.
        show: Called with the fraction done and the current activity.
    """
    left = _left(participants)
    for place, one in enumerate(left):
        show(0.3 * place / len(left), f"{one.row.work}: {one.row.name} is warming up")
        one.prepare()
    left = _left(left)
    costs = {id(one): _cost(one, effort.block) for one in left}
    left = _left(left)
    rounds = effort.rounds or _rounds(effort.seconds, sum(costs[id(one)] for one in left))
    for number in range(rounds):
        turn = number % max(1, len(left))  # rotate, so that none always follows the same one
        for place, one in enumerate(left[turn:] + left[:turn]):
            share = (number + place / len(left)) / rounds
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
    """Sets the number of calls in a block, and returns roughly how many seconds a block takes."""
    seconds, _ = one.timed(1)
    one.row.calls = max(1, math.ceil(block / seconds)) if seconds else 1
    return (seconds + sum(one.timed(1, part)[0] for part in list(one.row.parts))) * (one.row.calls + 1)


def _rounds(seconds: float, cost: float) -> int:
    return max(FEWEST, min(MOST, int(seconds / cost))) if cost else FEWEST
