"""Where the time of steps goes, by records of which it is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvkeras.diagnostics.record import Record
from hvkeras.diagnostics.time_split import PAUSE, TimeSplit, pauses, runs_by_key, shortest_times, time_splits

STEPS = 40
Array = np.ndarray[Any, Any]


def record(rank: int, *, size: int = 2, step: float = 1.0, arrived: float | None = 0.5,
           inputs: tuple[float, float] = (),
           collectives: dict[str, tuple[float, float]] | None = None, operation: str = "gradients",
           clock: float = 0.0, updates: tuple[float, float] | tuple[()] = ()) -> Record:
    """A rank whose steps are all alike: `ready` at whole steps, the rest in seconds after the step before was ready."""
    begins = clock + 1000.0 + step * np.arange(STEPS)
    stamps = np.zeros((STEPS, 4))
    stamps[:, 0], stamps[:, 1] = begins, 8.0 * np.arange(1, STEPS + 1)
    if arrived is not None:
        stamps[:, 3] = begins - step + arrived
    spans = {key: np.add.outer(begins, span) for key, span in (collectives or {}).items()}
    return Record(rank, size, "native", stamps=stamps, inputs=np.add.outer(begins, inputs).reshape(-1, 2),
                  updates=np.add.outer(begins, updates).reshape(-1, 2), collectives=spans,
                  first_runs=dict.fromkeys(spans, 0),
                  buckets={key: {"label": key, "operation": operation, "bytes": 8} for key in spans})


def parts(split: TimeSplit) -> list[float | None]:
    return [split.step, split.input, split.compute, split.wait, split.communication, split.hidden]


def test_a_step_is_split_without_comparing_clocks() -> None:
    # Rank 0 waits 0.2 s for rank 1, whose batch takes as much longer; both communicate for 0.1 s.
    ranks = [record(0, inputs=(0.3, 0.4), collectives={"a": (0.0, 0.3)}),
             record(1, inputs=(0.1, 0.4), collectives={"a": (0.0, 0.1)}, clock=-77.0)]
    found = time_splits(ranks)
    assert parts(found[0]) == pytest.approx([1.0, 0.1, 0.6, 0.2, 0.1, 0.0])
    assert parts(found[1]) == pytest.approx([1.0, 0.3, 0.6, 0.0, 0.1, 0.0])
    assert found[0].steps == STEPS - 1 - 5


def test_buckets_that_run_beside_the_backward_pass_are_hidden() -> None:
    early, late = (-0.2, -0.1), (-0.15, 0.2)  # one ends before all gradients are there, the other after
    ranks = [record(rank, collectives={"early": early, "late": late}) for rank in range(2)]
    assert parts(time_splits(ranks)[0]) == pytest.approx([1.0, 0.0, 0.8, 0.0, 0.2, 0.2])  # hidden: -0.2 to 0


def test_the_update_is_what_comes_after_communication() -> None:
    # The first bucket is still on its way for half of the time in which the update runs.
    ranks = [record(rank, collectives={"a": (0.0, 0.2)}, updates=(0.1, 0.3)) for rank in range(2)]
    found = time_splits(ranks)[0]
    assert parts(found) == pytest.approx([1.0, 0.0, 0.7, 0.0, 0.2, 0.0])
    assert found.update == pytest.approx(0.1)
    assert found.busy == pytest.approx(0.8)


def test_other_collectives_hold_the_forward_pass_up() -> None:
    ranks = [record(rank, collectives={"statistics": (-0.3, -0.1)}, operation="allreduce") for rank in range(2)]
    assert parts(time_splits(ranks)[0]) == pytest.approx([1.0, 0.0, 0.8, 0.0, 0.2, 0.0])


def test_a_batch_that_is_fetched_beside_computing_is_no_input() -> None:
    # From 0.2 to 0.9, while the model has had its batch, the one before, since 0.5.
    ranks = [record(rank, inputs=(0.2, 0.9), collectives={"a": (0.0, 0.1)}) for rank in range(2)]
    assert time_splits(ranks)[0].input == pytest.approx(0.3)


def test_what_is_fetched_while_collectives_run_is_communication() -> None:
    ranks = [record(rank, inputs=(0.05, 0.3), collectives={"a": (0.0, 0.1)}) for rank in range(2)]
    assert parts(time_splits(ranks)[1]) == pytest.approx([1.0, 0.2, 0.7, 0.0, 0.1, 0.0])


def test_without_a_model_the_fetch_tells_when_the_batch_came() -> None:
    ranks = [record(rank, arrived=None, inputs=(0.3, 0.4), collectives={"a": (0.0, 0.2), "b": (0.7, 0.9)})
             for rank in range(2)]
    assert parts(time_splits(ranks)[0]) == pytest.approx([1.0, 0.1, 0.7, 0.0, 0.2, 0.2])


def test_pauses_and_the_warm_up_do_not_count() -> None:
    rank = record(0, size=1)
    rank.stamps[20:, [0, 3]] += 3 * PAUSE
    rank.stamps[:2, 0] -= 4.0
    assert pauses(rank) == pytest.approx((0.0, STEPS - 1 - 5 - 1)), "the first pause is warm-up as well"
    rank.stamps[30:, [0, 3]] += 2 * PAUSE
    split = time_splits([rank])[0]
    assert split.step == pytest.approx(1.0)
    assert split.steps == STEPS - 1 - 5 - 2
    assert pauses(rank) == pytest.approx((1 + 2 * PAUSE, STEPS - 1 - 5 - 1 + 2 * PAUSE))


def test_a_step_of_two_kinds_is_a_round_of_both() -> None:
    rank = record(0, size=1)
    rank.stamps[1::2, 2] = 1.0  # a generator and its critic
    assert time_splits([rank])[0].step == pytest.approx(2.0)


@pytest.mark.parametrize("missing", [None, "collectives of another rank"])
def test_without_all_records_waiting_is_not_known(missing: str | None) -> None:
    first = record(0, collectives={"a": (0.0, 0.3)})
    found = time_splits([first, None] if missing is None else [first])
    assert parts(found[0]) == pytest.approx([1.0, 0.0, 0.7, None, 0.3, 0.0])
    assert list(found) == [0]


def test_runs_are_matched_by_their_numbers() -> None:
    # Rank 1 was killed: its record ends ten steps before; rank 0's table holds the latest runs alone.
    ranks = [record(0, collectives={"a": (0.0, 0.3)}), record(1, collectives={"a": (0.0, 0.1)})]
    ranks[0].collectives["a"], ranks[0].first_runs["a"] = ranks[0].collectives["a"][8:], 8
    ranks[1].collectives["a"], ranks[1].stamps = ranks[1].collectives["a"][:-10], ranks[1].stamps[:-10]
    lengths, first = shortest_times([runs_by_key(rank) for rank in ranks])["a"]
    assert (len(lengths), first) == (STEPS - 18, 8)
    found = time_splits(ranks)
    assert parts(found[0]) == pytest.approx([1.0, 0.0, 0.7, 0.2, 0.1, 0.0])
    assert found[0].steps == STEPS - 18
    assert found[1].wait == pytest.approx(0.0)


def test_a_rank_without_steps_has_no_split() -> None:
    compiled = Record(1, 2, "native", no_steps="it is compiled")
    assert list(time_splits([record(0), compiled])) == [0]
    assert time_splits([compiled, None]) == {}
