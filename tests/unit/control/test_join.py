"""Which ranks must participate in the collectives of others."""

from __future__ import annotations

from typing import Any

from hvkeras.control.cause import CauseKind
from hvkeras.control.deadlocks import Problem, Waits
from hvkeras.control.join import REFUSED_WITHIN, Participation
from hvkeras.control.messages import Participate, PlanRefused


def made(**plans: tuple[int, ...]) -> tuple[Waits, Participation]:
    """Waits and joined ranks that know some plans of these ranks."""
    waits, participation = Waits(4, 3.0, 10.0, 60.0), Participation()
    for key, ranks in plans.items():
        waits.describe(key, {"label": key, "ranks": list(ranks)})
    return waits, participation


def asked(participation: Participation, waits: Waits) -> list[Any]:
    """What the ranks that must participate are asked: the rank, the plan, and how often."""
    requests = list(participation.requests(waits))
    assert all(isinstance(message, Participate) for _, message in requests)
    return [(rank, message.key, message.times) for rank, message in requests if isinstance(message, Participate)]


def test_joined_ranks_are_asked_once_for_each_entry_of_the_others() -> None:
    waits, participation = made(a=(0, 1, 2, 3), b=(0, 3))
    waits.update([0, 1], {"a": 2})
    waits.update([0], {"b": 1})
    assert asked(participation, waits) == []
    participation.join(2)
    assert asked(participation, waits) == [], "nobody has told yet what the plan consists of"
    participation.add_calls({"a": [], "b": []})
    assert asked(participation, waits) == [(2, "a", 2)]
    assert asked(participation, waits) == []
    participation.join(3)
    assert asked(participation, waits) == [(3, "a", 2), (3, "b", 1)]
    waits.update([0], {"a": 3})
    assert asked(participation, waits) == [(2, "a", 1), (3, "a", 1)]
    waits.update([1, 2, 3], {"a": 3})
    participation.joined.clear()
    waits.update([1], {"a": 4})
    assert asked(participation, waits) == []
    participation.join(0)
    assert asked(participation, waits) == [(0, "a", 1)]


def test_refused_plans_end_once_all_that_wait_know_and_the_others_have_participated() -> None:
    waits, participation = made(a=(0, 1, 2), b=(0, 1, 2))
    waits.update([0, 1], {"a": 1})
    waits.update([2], {"b": 1})
    finding = Problem(CauseKind.MISMATCH, None, "unlike", ("a", "b"))
    assert participation.refuse(finding, 0.0) and participation.is_busy
    assert list(participation.requests(waits)) == [], "nobody has told yet what the plans consist of"
    participation.add_calls({"a": [], "b": []})
    assert list(participation.requests(waits)) == [
        (0, PlanRefused("a", "unlike", ["b"])), (1, PlanRefused("a", "unlike", ["b"])),
        (2, PlanRefused("b", "unlike", ["a"]))]
    for rank, key in ((0, "a"), (1, "a")):
        assert participation.confirm(rank, key) == "unlike"
        assert list(participation.requests(waits)) == []
    participation.confirm(2, "b")
    assert sorted(asked(participation, waits)) == [(0, "b", 1), (1, "b", 1), (2, "a", 1)]
    waits.update([0, 1], {"b": 1})
    assert asked(participation, waits) == [] and participation.is_busy
    assert participation.refuse(finding, REFUSED_WITHIN - 1.0) and not participation.refuse(finding, REFUSED_WITHIN)
    waits.update([2], {"a": 1})
    assert asked(participation, waits) == [] and not participation.is_busy
