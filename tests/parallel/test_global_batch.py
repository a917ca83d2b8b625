"""Batches of all ranks: fit, evaluate and predict give what they give in one process, in float64, noise aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "global_batch.py"
SLOW = ("masks", "reductions", "structures", "py_datasets_and_eager_steps", "zipped_batches", "constant_batch_sizes",
        "equal_rows_of_embeddings")
SAME = ("arrays", "losses_and_metrics_of_users", "steps_of_users", "sharded_updates",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
MAPPED_BY_OWNERS = ("map", "map before shuffle", "zipped elements", "table", "cache", "unknown length")
REFUSED = {
    "fixed batch": "a model must take any number of rows",
    "stateful": "a layer must not keep states of rows from batch to batch",
    "unseeded arrays": "All ranks must have the same data, but x differs.",
    "unseeded batches": "All ranks must get the same batches, since each computes a part of them.",
    "graphs": "All arrays of a batch must have the same number of rows",
    "already distributed": "not distribute itself. Received: call='hvd.DistributedOptimizer'",
    "already sharded": "not distribute itself. Received: call='hvd.shard'",
}


@pytest.fixture(scope="module")
def alone(launch_once: Callable[..., Outcome]) -> Outcome:
    return launch_once("hvkeras_run", WORKER, np=1, deadline=300)


@pytest.fixture(params=["native-2", pytest.param("native-3", marks=pytest.mark.slow),
                        pytest.param("tfdist-2", marks=pytest.mark.nightly),
                        pytest.param("horovod-2", marks=pytest.mark.nightly)])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    backend, _, ranks = request.param.partition("-")
    return launch_once("tf_config" if backend == "tfdist" else "hvkeras_run", WORKER, np=int(ranks), backend=backend,
                       deadline=300)


@pytest.mark.parametrize("check", SAME)
def test_training_is_that_of_one_process(check: str, outcome: Outcome, alone: Outcome) -> None:
    [expected] = alone.results(check)
    for found in outcome.results(check):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_pipelines_give_what_they_give_one_process(outcome: Outcome, alone: Outcome) -> None:
    [expected] = alone.results("pipelines")
    for found in outcome.results("pipelines"):
        for name, numbers in expected.items():
            np.testing.assert_allclose(found[name], numbers, rtol=1e-8, atol=1e-8, err_msg=name)


def test_elements_are_mapped_by_the_rank_that_computes_them(outcome: Outcome) -> None:
    found = outcome.results("rows_that_this_rank_maps")
    for name in MAPPED_BY_OWNERS:
        rows = [each[name] for each in found]
        whole = {"map before shuffle": 122, "unknown length": 40}.get(name, 61)
        dummies = sum(rows) - whole  # a rank without a row in a last batch of one row computes that row as well
        assert 0 <= dummies <= 2 * (len(rows) - 1), (name, rows)
        assert max(rows) - min(rows) <= 2 * 6, (name, rows)
    for name in ("unequal shapes", "map of batches", "python"):
        assert [each[name] for each in found] == [None] * len(found)


@pytest.mark.slow
def test_steps_of_users_are_checked(outcome: Outcome, alone: Outcome) -> None:
    [expected] = alone.results("steps_that_are_checked")
    for found in outcome.results("steps_that_are_checked"):
        for kind in ("mean", "moving average", "gathered pairs"):
            np.testing.assert_allclose(found[kind], expected[kind], rtol=1e-8, atol=1e-8, err_msg=kind)
        for kind, what in {"pairs": "the gradients of", "sum": "the gradients of", "queue": "the values of"}.items():
            assert "Own.train_step must compute means over the rows of its batch" in found[kind]
            assert f"ranks {what} own" in found[kind]
            assert "hvd.allgather(embeddings)" in found[kind]


def test_what_cannot_be_divided_is_refused(outcome: Outcome) -> None:
    for found in outcome.results("refusals"):
        for name, words in REFUSED.items():
            assert words in found[name]
            assert "HINT: " in found[name]
        assert found["strategy"] == "trained"


def test_ranks_draw_different_numbers_from_equal_generators(outcome: Outcome) -> None:
    found = outcome.results("noise")
    assert found == [found[0]] * len(found)
    assert found[0][0] == 12
