"""One rank wants to stop: what the server asks and tells, and what a rank does meanwhile."""

from __future__ import annotations

import threading

import pytest

from hvkeras.control.messages import StopAfter, StopQuestion
from hvkeras.control.stop_agreement import Stop, Stops
from hvkeras.errors import PeerError


def nothing() -> None:
    pass


def test_all_stop_after_the_latest_execution_that_a_rank_has_come_to() -> None:
    stops = Stops()
    assert list(stops.ask(2, "fit", [0, 2, 5])) == [([0, 2, 5], StopQuestion("fit"))]
    assert list(stops.ask(5, "fit", [0, 2, 5])) == [], "one question is enough"
    assert [list(stops.receive(rank, "fit", done)) for rank, done in ((2, 7), (0, 8))] == [[], []]
    assert list(stops.receive(5, "fit", 7)) == [([0, 2, 5], StopAfter("fit", 8, [2, 2, 5, 5]))]
    assert list(stops.ask(0, "fit", [0, 2, 5])) == [], "it is decided"


def test_a_rank_that_was_asked_goes_no_further_than_it_said() -> None:
    stop = Stop()
    stop.begin()
    assert not stop.now(False, nothing, nothing, 10.0)
    assert stop.answer() == 2, "it is about to begin the second"
    stop.begin()
    assert stop.answer() == 2
    went: list[bool] = []
    waiting = threading.Thread(target=lambda: went.append(stop.now(False, nothing, nothing, 10.0)))
    waiting.start()
    waiting.join(0.3)
    assert went == [], "it waits for the word"
    stop.decide(3, [1])
    waiting.join(10.0)
    assert went == [False]
    stop.begin()
    assert stop.now(False, nothing, nothing, 10.0)


def test_a_rank_asks_once_and_waits_for_no_longer_than_it_may() -> None:
    asked: list[int] = []
    stop = Stop()
    stop.begin()
    for _ in range(2):
        with pytest.raises(PeerError, match="All ranks must agree on when to stop training within 0"):
            stop.now(True, lambda: asked.append(1), nothing, 0.1)
    assert asked == [1]
