"""Ranks that stand still: what the server finds of what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvkeras.control.cause import CauseKind
from hvkeras.control.deadlocks import MAX_WARNINGS
from hvkeras.control.messages import Standstill
from hvkeras.control.stalls import Stalls

STALLED = CauseKind.STALLED


def still(seconds: float, **changes: Any) -> Standstill:
    return replace(Standstill(seconds, seconds, "train step 3 of epoch 1", "train", True, True), **changes)


def found(stalls: Stalls, waiting: Any = ()) -> list[tuple[CauseKind | None, int | None]]:
    return [(finding.kind, finding.rank) for finding in stalls.check(waiting)]


def test_a_stall_is_reported_ever_more_rarely_and_then_ends_the_job() -> None:
    stalls = Stalls(10.0, 60.0)
    told = []
    for seconds in range(5, 60, 5):
        stalls.update(1, still(float(seconds)))
        told += [seconds] if found(stalls) == [(None, 1)] else []
    assert told == [10, 20, 40]
    stalls.update(1, still(60.0))
    (finding,) = stalls.check(())
    assert (finding.kind, finding.rank) == (STALLED, 1)
    assert finding.text == ("has made no progress for 60 s: train step 3 of epoch 1"
                            " (HVKERAS_STALL_SHUTDOWN sets the limit)")


def test_a_rank_that_moves_again_is_reported_again() -> None:
    stalls = Stalls(10.0, 60.0)
    stalls.update(0, still(10.0))
    assert found(stalls) == [(None, 0)]
    stalls.update(0, None)
    assert found(stalls) == []
    stalls.update(0, still(10.0))
    assert found(stalls) == [(None, 0)]


def test_ranks_that_wait_for_others_or_are_waited_for_are_left_to_the_waits() -> None:
    stalls = Stalls(10.0, 60.0)
    for rank in range(3):
        stalls.update(rank, still(100.0))
    assert found(stalls, waiting={0, 1, 2}) == []
    assert found(stalls, waiting={0, 1}) == [(STALLED, 2)]


def test_the_job_does_not_end_where_that_may_take_long_or_something_still_runs() -> None:
    stalls = Stalls(0.0, 60.0)
    stalls.update(0, still(100.0, may_end=False))
    stalls.update(1, still(100.0, python_seconds=1.0))  # its Python code goes on
    assert found(stalls) == []


def test_a_custom_loop_is_reported_once() -> None:
    stalls = Stalls(10.0, 60.0)
    for seconds in (10.0, 50.0, 1000.0):
        stalls.update(0, still(seconds, in_loop=False, may_end=False))
        assert found(stalls) == ([(None, 0)] if seconds == 10.0 else [])


def test_the_rank_that_is_named_is_not_in_a_step_that_may_wait_for_it() -> None:
    stalls = Stalls(0.0, 60.0)
    stalls.update(0, still(70.0))
    stalls.update(1, still(65.0, phase="input", text="input, the batch of train step 3 of epoch 1"))
    stalls.update(2, still(61.0))
    (finding,) = stalls.check(())
    assert finding.rank == 1
    assert "input, the batch of train step 3 of epoch 1; ranks 0, 2 have made no progress either (" in finding.text


def test_of_very_many_ranks_some_say_where_they_are_and_the_others_are_named() -> None:
    stalls = Stalls(10.0, 0.0)
    for rank in range(MAX_WARNINGS + 2):
        stalls.update(rank, still(10.0))
    findings = stalls.check(())
    assert [finding.rank for finding in findings] == list(range(MAX_WARNINGS))
    assert findings[0].text == f"2 more ranks are not moving either: {MAX_WARNINGS}, {MAX_WARNINGS + 1}"


def test_a_thousand_ranks_that_stand_still_make_short_texts() -> None:
    stalls = Stalls(10.0, 60.0)
    assert not stalls.any_stalled
    for rank in range(1000):
        stalls.update(rank, still(10.0))
    assert stalls.any_stalled
    findings = stalls.check(())
    assert findings[0].text == "992 more ranks are not moving either: 8 to 999"
    assert {finding.text for finding in findings[1:]} == {""} and len(findings) == MAX_WARNINGS
    stalls.update(0, still(60.0))
    (finding,) = stalls.check({3})
    assert "; ranks 1, 2, 4 to 999 have made no progress either (HVKERAS_STALL_SHUTDOWN" in finding.text
