"""What the spans of ranks say together."""

from __future__ import annotations

import numpy as np
import pytest

from hvkeras.diagnostics.rank_times import COMMUNICATION, STEP_TIME, WAIT, RankTimes, figures
from hvkeras.diagnostics.ring_buffer import Rows
from hvkeras.diagnostics.spans import CAPACITY


def rows(*pairs: tuple[float, float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array(pairs, np.float64).reshape(-1, 2)


def test_the_rank_that_comes_last_does_not_wait() -> None:
    # Two steps of a second; rank 1 comes 0.3 s late to the first and in time to the second, which takes 0.1 s of both.
    everyone = {0: RankTimes(2, 2.0, {"a": rows((0.2, 0.6), (1.4, 1.5))}),
                1: RankTimes(2, 2.0, {"a": rows((100.5, 100.6), (101.4, 101.5))})}  # on a clock of its own
    found = figures(everyone)
    assert found[0] == pytest.approx({STEP_TIME: 1000.0, COMMUNICATION: 250.0, WAIT: 150.0})
    assert found[1] == pytest.approx({STEP_TIME: 1000.0, COMMUNICATION: 100.0, WAIT: 0.0})


def test_what_runs_at_once_counts_once() -> None:
    everyone = {0: RankTimes(1, 1.0, {"a": rows((0.1, 0.5)), "b": rows((0.2, 0.6)), "c": rows((0.25, 0.3))}),
                1: RankTimes(1, 1.0, {"a": rows((0.1, 0.3)), "b": rows((0.3, 0.4)), "c": rows((0.5, 0.55))})}
    found = figures(everyone)
    assert found[0][COMMUNICATION] == pytest.approx(500.0)
    assert found[0][WAIT] == pytest.approx(400.0)  # 0.1 to 0.3 in a, 0.2 to 0.5 in b
    assert found[1][COMMUNICATION] == pytest.approx(350.0)
    assert found[1][WAIT] == pytest.approx(0.0)


def test_collectives_of_some_ranks_are_compared_among_them() -> None:
    everyone = {0: RankTimes(1, 1.0, {"of 0 and 1": rows((0.0, 0.3))}),
                1: RankTimes(1, 1.0, {"of 0 and 1": rows((0.2, 0.3)), "of 1 and 2": rows((0.4, 0.5))}),
                2: RankTimes(1, 1.0, {"of 1 and 2": rows((0.0, 0.5))})}
    assert [figures(everyone)[rank][WAIT] for rank in range(3)] == pytest.approx([200.0, 0.0, 400.0])


def test_what_is_not_known_is_left_out() -> None:
    assert figures({0: RankTimes(0, 0.0)}) == {}
    assert figures({0: RankTimes(4, 1.0)}) == {0: {STEP_TIME: 250.0}}
    alone = figures({2: RankTimes(1, 1.0, {"a": rows((0.1, 0.3))})})
    assert alone == {2: pytest.approx({STEP_TIME: 1000.0, COMMUNICATION: 200.0})}


def test_the_runs_that_only_some_know_are_no_wait() -> None:
    everyone = {0: RankTimes(2, 2.0, {"a": rows((0.0, 0.5), (1.0, 1.5))}),
                1: RankTimes(2, 2.0, {"a": rows((1.2, 1.5))})}
    assert figures(everyone)[0] == pytest.approx({STEP_TIME: 1000.0, COMMUNICATION: 500.0, WAIT: 100.0})


def test_times_are_those_of_the_steps() -> None:
    executions = np.array([(10.0, 10.4, 3, 5), (10.5, 11.0, 6, 7)])
    collectives = {"a": Rows(rows((9.0, 9.5), (10.1, 10.2), (10.6, 10.7), (11.5, 11.6)), 0),
                   "b": Rows(rows((1.0, 2.0)), 0)}
    times = RankTimes.of(executions, collectives)
    assert (times.steps, times.seconds) == (5, 1.0)
    assert set(times.collectives) == {"a"}
    assert times.collectives["a"].tolist() == [[10.1, 10.2], [10.6, 10.7]]
    assert RankTimes.of(executions[:0], collectives) == RankTimes(0, 0.0)


def test_steps_of_which_spans_are_lost_are_not_looked_at() -> None:
    begins = 100.0 + np.arange(CAPACITY)
    full = np.stack([begins, begins + 0.5], axis=1)
    executions = np.array([(99.5, 100.6, 0, 0), (100.7, 101.6, 1, 1), (101.7, 102.6, 2, 2)])
    times = RankTimes.of(executions, {"a": Rows(full, 1)})
    assert (times.steps, times.seconds) == (2, pytest.approx(1.9))
    assert times.collectives["a"].tolist() == [[101.0, 101.5], [102.0, 102.5]]
