"""Each sample is assigned to one rank, ranks have equally many steps, and different data on the ranks raise errors."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "sharding.py"
COUNT = 43
RUNS = {
    "2-horovod": ("hvkeras_run", "horovod", 2, "0"),
    "3-tfdist-tf_keras": ("tf_config", "tfdist", 3, "1"),
    "2-native": ("hvkeras_run", "native", 2, "0"),
    "3-native": ("hvkeras_run", "native", 3, "0"),
    "4-native": ("hvkeras_run", "native", 4, "0"),
}


MARKS = {"2-native": (), "3-native": (pytest.mark.sample, pytest.mark.slow)}


@pytest.fixture(params=[pytest.param(run, marks=MARKS.get(run, pytest.mark.nightly)) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, size, legacy = RUNS[request.param]
    return launch_once(launcher, WORKER, np=size, backend=backend, env={"TF_USE_LEGACY_KERAS": legacy})


def require_even(ranks: list[list[list[int]]], dropped: int) -> None:
    """Assert that in each step ranks have equally many rows, and that over the epoch no row repeats or is missing."""
    assert all([len(step) for step in rank] == [len(step) for step in ranks[0]] for rank in ranks)
    seen = [row for rank in ranks for step in rank for row in step]
    assert len(seen) == len(set(seen)) == COUNT - dropped
    assert set(seen) <= set(range(COUNT))


def epochs(found: list[dict[str, Any]], name: str) -> list[list[list[list[int]]]]:
    """Return the rows of all ranks, by epoch."""
    return [list(epoch) for epoch in zip(*(rank[name] for rank in found), strict=True)]


def test_arrays(outcome: Outcome) -> None:
    found = outcome.results("arrays")
    for epoch in epochs(found, "steps"):
        require_even(epoch, COUNT % len(found))
    assert sorted(row for rank in found for row in rank["evaluation"]) == list(range(COUNT))
    shuffled = [row for rank in found for row in rank["shuffled"]]
    assert len(set(shuffled)) == len(shuffled) == COUNT - COUNT % len(found)
    assert found[0]["shuffled"] != sorted(found[0]["shuffled"])


def test_one_rank_says_what_all_got(outcome: Outcome) -> None:
    size = len(outcome.results("arrays"))
    lines, left = outcome.stderr(0), COUNT % size
    mine, dropped = len(range(0, COUNT, size)), f", {left} dropped" if left else ""
    assert f"hvkeras: shard: {size} ranks x {COUNT // size} of {COUNT} samples{dropped}\n" in lines
    if left:
        assert f"hvkeras: shard: {size} ranks share {COUNT} samples, {mine} of them on this rank\n" in lines
    assert f"shard: each of {size} ranks gets 1 of every {size} samples of a dataset of unknown length" in lines
    assert "contents are random each time they are read" in lines
    assert all("hvkeras: shard: " not in outcome.stderr(rank) for rank in range(1, size))


@pytest.mark.parametrize("kind", ["samples", "generator", "generated rows", "batches", "shuffled before",
                                  "shuffled without a seed", "shuffled and filtered", "shuffled with other seeds",
                                  "shuffled samples"])
def test_datasets(kind: str, outcome: Outcome) -> None:
    found = outcome.results("datasets")
    for epoch in epochs(found, kind):
        require_even(epoch, COUNT % len(found))
    if kind == "samples" or kind.startswith("shuffled"):
        assert found[0][kind][0] != found[0][kind][1], "each epoch has another order"


@pytest.mark.parametrize("kind", ["evaluation", "evaluation of shuffled batches"])
def test_evaluation_of_datasets(kind: str, outcome: Outcome) -> None:
    rows = [row for rank in outcome.results("datasets") for step in rank[kind][0] for row in step]
    assert sorted(rows) == list(range(COUNT))


@pytest.mark.slow
def test_ranks_train_on_shuffled_batches_like_one_process(outcome: Outcome) -> None:
    for found in outcome.results("trained_on_shuffled_batches"):
        assert found["found"] == pytest.approx(found["truth"], rel=1e-5, abs=1e-8)  # the last losses are tiny


@pytest.mark.parametrize("kind", ["shuffled by fit", "shuffled by itself"])
def test_sequences(kind: str, outcome: Outcome) -> None:
    found = outcome.results("sequences")
    for epoch in epochs(found, kind):
        require_even(epoch, COUNT % len(found))
    # with more ranks there are few batches, whose order may repeat by chance
    if kind == "shuffled by itself" or len(found) == 2:
        assert len({str(epoch) for epoch in found[0][kind]}) == len(found[0][kind]), "each epoch has another order"


def test_sequences_leave_the_ranks_own_state(outcome: Outcome) -> None:
    found = outcome.results("sequences")
    assert all(rank["keeps the global state"] for rank in found)
    assert sorted(row for rank in found for row in rank["evaluation"]) == list(range(COUNT))
    assert all(len(rank["loaded"]) <= 11 // len(found) + 4 for rank in found)


def test_whole_elements_count_by_their_rows(outcome: Outcome) -> None:
    for found in outcome.results("whole_elements"):
        for kind in ("dataset", "sequence"):
            assert found["found"][kind] == pytest.approx(found["truth"][kind], rel=1e-5), kind
        assert found["predicted"] is not False
        assert found["predicted"] <= 1e-6
        assert found["few"] == pytest.approx(found["few truth"]), "ranks without elements participate"
    size = len(outcome.results("whole_elements"))
    assert f"hvkeras: shard: {size} ranks x 3 of {3 * size + 1} elements, 1 dropped" in outcome.stderr(0)


def test_each_array_is_cut_by_its_own_rows(outcome: Outcome) -> None:
    results = outcome.results("unlike_numbers_of_rows")
    size = len(results)
    for rank, found in enumerate(results):
        firsts = [(4 * size * step + rows * rank, rows) for step, rows in ((0, 4), (1, 4), (2, 1))]
        assert found["in ratio"] == [[[first, rows], [3 * first, 3 * rows]] for first, rows in firsts]
        assert found["mapped"][:2] == found["in ratio"][:2]
        assert found["mapped"][2] == [[8 * size + rank, 1], [24 * size + 12 * rank, 12]], "no ratio: each by itself"
        assert found["to evaluate"] == ([[[9 * size - 1, 1], [0, 3 * size]]] if rank == size - 1 else [[[-1, 0]] * 2])
        assert found["lengths"] == [3, 3, 1]
        assert found["torn"][0] == "InvalidArgumentError"
        assert "All arrays of every batch must have the same number of rows" in found["torn"][1]
        assert "[8 5]" in found["torn"][1]
    assert f"shard: {size} ranks x {9 * 4} of {36 * size} rows\n" in outcome.stderr(0)


@pytest.mark.parametrize(("misuse", "words"), [
    ("graphs as batches", 'by="elements"'), ("graphs in a sequence", 'by="elements"'), ("views", "rows=[8, 24]"),
    ("no ratio for the ranks", "choose batch sizes"), ("arrays by elements", "arrays are assigned row by row"),
    ("by something else", "rows or elements"), ("fewer elements than ranks", "at least one element per rank"),
    ("fewer batches than ranks", "evaluate on one"),
    ("different lengths", "rank_0='12 samples', rank_1='13 samples'"), ("sharded before", "not a part of them"),
    ("shuffled before", "with the same seed on every rank"), ("different arguments", "training=False"),
    ("two arguments", r"x, y = hvd.shard((x, y))"), ("dataset sharded before", "not a part of it"),
    ("shuffle before an unknown stage", "hvd.shard(dataset, shuffle=24).ignore_errors(...).map(twice).batch(8 // hvd"),
    ("more shuffles on a rank", "rank_0='0 shuffles', rank_1='1 shuffles'"),
    ("random filter", "a function that selects them draws random numbers"),
    ("generator shuffled apart", "the same data in the same order"), ("unordered", "remove deterministic=False"),
    ("unknown batches", "pass batched=True"), ("shuffled batches", "before its batch()"),
    ("shuffle without a buffer", "pass shuffle=1000"), ("too few", "Training needs at least one sample per rank"),
    ("sequence in another order", "construct the same data"), ("sequence of another length", "7 batches"),
    ("sequence shuffled apart", "which hvkeras seeds alike"), ("predict of parts", "do not shard them before"),
    ("predict of other lengths", "7 batches"), ("predict without end", "take() some batches"),
])
def test_misuse(misuse: str, words: str, outcome: Outcome) -> None:
    for found in outcome.results("errors"):
        kind, text = found[misuse]
        assert kind == "UsageError", text
        assert words in text
        assert "HINT" in text


@pytest.mark.parametrize(("misuse", "kind", "words"), [
    ("reading fails on rank 1", "UnknownError", "the disk is full"),
    ("predict fails on rank 1", "ZeroDivisionError", "division by zero"),
])
def test_what_fails_on_one_rank_stops_all(misuse: str, kind: str, words: str, outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("errors")):
        assert found[misuse][0] == (kind if rank == 1 else "PeerError")
        assert words in found[misuse][1]
        assert rank == 1 or "rank_1=" in found[misuse][1]


def test_augmented_data_are_split(outcome: Outcome) -> None:
    found = outcome.results("what_is_random_at_every_reading")
    assert sorted(row for rank in found for row in rank) == list(range(24))


def test_some_ranks_only(outcome: Outcome) -> None:
    first, second, *others = outcome.results("some_ranks_only")
    assert (first, second) == ([0, 2, 4], [1, 3, 5])
    assert others == [None] * len(others)


def test_forked_processes_end_without_ending_the_job(outcome: Outcome) -> None:
    assert outcome.results("forked_process") == [-signal.SIGTERM] * len(outcome.results("forked_process"))


def test_forked_processes_know_their_rank_and_are_none(outcome: Outcome) -> None:
    found = outcome.results("forked_pool")
    assert [rank["places"] for rank in found] == [[[rank, len(found)]] * 4 for rank in range(len(found))]
    assert all("in a rank's own process" in rank["refusal"] for rank in found)
    assert [rank["failing"] for rank in found] == [5] * len(found)


@pytest.mark.slow
def test_predictions_are_those_of_one_process(outcome: Outcome) -> None:
    for found in outcome.results("predictions"):
        assert all(difference <= 1e-6 for differences in found.values() for difference in differences), found
