"""Participants that take turns in many short blocks, so that whatever disturbs the machine disturbs all alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvkeras.bench.jobs import Remote

FEWEST, MOST = 5, 200  # rounds, unless the user says how many


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: Seconds for all participants on one piece of work, together.
        rounds: How many rounds instead, or None.
        block: Seconds that a block should take, if it has several calls.
    """

    seconds: float
    rounds: int | None
    block: float


def compete(participants: Sequence[Remote], effort: Effort, show: Callable[[float, str], None]) -> None:
    """Has participants take turns until their time is up; one that fails leaves, with the reason in its row.

    Args:
        participants: Who takes part. Those with a reason in their row do not.
        effort: How long to measure.
        show: Told what share is done, and what is being done.
    """
    left = _left(participants)
    for place, one in enumerate(left):
        show(0.3 * place / len(left), f"{one.row.work}: {one.row.name} warms up")
        one.prepare()
    left = _left(left)
    costs = {id(one): _cost(one, effort.block) for one in left}
    left = _left(left)
    rounds = effort.rounds or _rounds(effort.seconds, sum(costs[id(one)] for one in left))
    for number in range(rounds):
        turn = number % max(1, len(left))  # nobody always follows the same one
        for place, one in enumerate(left[turn:] + left[:turn]):
            share = (number + place / len(left)) / rounds
            show(0.3 + 0.7 * share, f"{one.row.work}: {one.row.name}, round {number + 1} of {rounds}")
            seconds = one.timed(one.row.calls)
            one.row.blocks.append(seconds / one.row.links)
        left = _left(left)
    for one in left:
        one.finish()
    for one in participants:
        if one.row.reason:
            one.row.blocks = []


def _left(participants: Sequence[Remote]) -> list[Remote]:
    return [one for one in participants if not one.row.reason]


def _cost(one: Remote, block: float) -> float:
    """Fixes how many calls a block has, and returns about how many seconds it takes."""
    seconds = one.timed(1)
    one.row.calls = max(1, math.ceil(block / seconds)) if seconds else 1
    return seconds * (one.row.calls + 1)


def _rounds(seconds: float, cost: float) -> int:
    return max(FEWEST, min(MOST, int(seconds / cost))) if cost else FEWEST
