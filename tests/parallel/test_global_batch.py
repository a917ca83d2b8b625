"""Batches of all ranks: training, with its noise, is that of one process, whatever rows of a batch have to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "global_batch.py"
QUICK = ("arrays", "contrastive_losses", "policies", "batches_of_graphs", "loops_of_users")
SLOW = (
    "masks", "reductions", "losses_and_metrics_of_users", "structures", "py_datasets_and_eager_steps", "pipelines",
    "zipped_batches", "steps_of_users", "constant_batch_sizes", "equal_rows_of_embeddings",
    "statistics_over_the_batch", "running_statistics", "losses_of_whole_batches", "adversaries_with_noise",
    "networks_that_follow_another", "accumulated_gradients", "mixtures_of_experts", "sequences_of_unequal_lengths",
    "batches_of_a_fixed_size", "values_that_are_not_finite", "several_steps_per_execution", "augmentation",
    "compiled_by_xla", "mixed_precision", "eager_steps", "plain_tensorflow", "models_of_tf_keras",
)
TOLERANCES = {"augmentation": 1e-5, "mixed_precision": 1e-2}  # in float32, and in 16 bits
MAPPED_BY_OWNERS = ("map", "map before shuffle", "zipped elements", "table", "cache", "unknown length")
REFUSED = {
    "unseeded arrays": "All ranks must have the same data, but x differs.",
    "unseeded batches": "All ranks must get the same batches, since each computes a part of them.",
    "already distributed": "not distribute itself. Received: call='hvd.DistributedOptimizer'",
    "already sharded": "not distribute itself. Received: call='hvd.shard'",
    "strategy": "--data-parallel trains models without a tf.distribute strategy.",
    "sharded update": "--data-parallel cannot shard the update of the weights",
}


@pytest.fixture(scope="module")
def alone(launch_once: Callable[..., Outcome]) -> Outcome:
    return launch_once("hvkeras_run", WORKER, np=1, deadline=300)


@pytest.fixture(params=["native-2", pytest.param("native-3", marks=pytest.mark.nightly),
                        pytest.param("tfdist-2", marks=pytest.mark.nightly),
                        pytest.param("horovod-2", marks=pytest.mark.nightly)])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    backend, _, ranks = request.param.partition("-")
    return launch_once("tf_config" if backend == "tfdist" else "hvkeras_run", WORKER, np=int(ranks), backend=backend,
                       deadline=600)


@pytest.mark.parametrize("check", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_training_is_that_of_one_process(check: str, outcome: Outcome, alone: Outcome) -> None:
    tolerance = TOLERANCES.get(check, 1e-8)
    [expected] = alone.results(check)
    for result in outcome.results(check):
        found, wanted = (each if isinstance(each, dict) else {"": each} for each in (result, expected))
        assert found.keys() == wanted.keys()
        for name, numbers in wanted.items():
            np.testing.assert_allclose(found[name], numbers, rtol=tolerance, atol=tolerance, err_msg=name)


def test_elements_are_mapped_by_the_rank_that_computes_them(outcome: Outcome) -> None:
    found = outcome.results("rows_that_this_rank_maps")
    for name in MAPPED_BY_OWNERS:
        rows = [each[name] for each in found]
        whole = {"map before shuffle": 122, "unknown length": 40}.get(name, 61)
        dummies = sum(rows) - whole  # a rank without a row in a last batch of one row computes that row as well
        assert 0 <= dummies <= 2 * (len(rows) - 1), (name, rows)
        assert max(rows) - min(rows) <= 2 * 6, (name, rows)
    for name in ("unequal shapes", "shuffled twice", "map of batches", "python"):
        assert [each[name] for each in found] == [None] * len(found)


def test_what_one_process_does_not_do_is_refused(outcome: Outcome) -> None:
    for found in outcome.results("refusals"):
        for name, words in REFUSED.items():
            assert words in found[name]
            assert "HINT: " in found[name]


def test_what_means_nothing_is_said_once(outcome: Outcome) -> None:
    told = "hvkeras_merge of Worst means nothing here: metrics see all rows"
    assert [outcome.stderr(rank).count(told) for rank in range(outcome.np)] == [1] + [0] * (outcome.np - 1)
