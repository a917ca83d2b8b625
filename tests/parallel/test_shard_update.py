"""`shard_update=True` trains like the unsharded update and like one process, with a part of the state on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "shard_update.py"
RUNS = {
    "few": ("hvkeras_run", "native", "0", 2),
    "keras3-native": ("hvkeras_run", "native", "0", 2),
    "keras3-native-4": ("hvkeras_run", "native", "0", 4),
    "tf_keras-native": ("hvkeras_run", "native", "1", 2),
    "keras3-tfdist": ("tf_config", "tfdist", "0", 2),
    "keras3-horovod": ("hvkeras_run", "horovod", "0", 2),
}
# Norms of shards are summed in another order, and compilation rounds differently.
ROUNDED = 1e-6
FROM_ONE = 2e-5  # one process sums the gradients of a batch in another order


@pytest.fixture(params=[pytest.param(run, marks=() if run == "few" else pytest.mark.nightly) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, legacy, ranks = RUNS[request.param]
    return launch_once(launcher, WORKER, ("--few",) if request.param == "few" else (), np=ranks, backend=backend,
                       env={"TF_USE_LEGACY_KERAS": legacy}, deadline=500)


@pytest.mark.parametrize("check", ["optimizers", pytest.param("corners", marks=pytest.mark.slow)])
def test_weights_and_state_are_those_of_training_without_sharing(check: str, outcome: Outcome) -> None:
    for found in outcome.results(check):
        assert found
        assert {name: result for name, result in found.items()
                if not (result[0] <= ROUNDED and result[1] <= ROUNDED and result[2] <= FROM_ONE and result[3])} == {}


@pytest.mark.slow
def test_fit_in_all_its_ways(outcome: Outcome) -> None:
    for found in outcome.results("ways_to_fit"):
        assert found.pop("compiled update") <= ROUNDED
        assert found.pop("XLA", 0.0) <= ROUNDED
        assert set(found.values()) == {0.0}


@pytest.mark.parametrize("check", ["process_sets", "local_variables"])
def test_who_shares_what(check: str, outcome: Outcome) -> None:
    assert [found[0] for found in outcome.results(check)] == [0.0] * len(outcome.results(check))


@pytest.mark.slow
def test_files_are_whole_and_plain(outcome: Outcome) -> None:
    first, *others = outcome.results("saved")
    assert first["end.keras"] == first["keras-2.keras"] == [0.0, "tf_keras" if "tf_keras" in str(first) else "keras"]
    assert len(first["own"]) == 4
    for found in (first, *others):
        assert (found["resumed True"], found["resumed False"]) == (0.0, 0.0)
    assert first["read by own"] == ["", ""]
    for found in others:
        for error in (found["without gathering"], *found["read by own"]):
            assert "call hvd.gather_optimizer(model) on all ranks first" in error


def test_a_root_sends_what_it_has_loaded(outcome: Outcome) -> None:
    assert set(outcome.results("broadcast_from_one_rank")) == {0.0}


def test_averages_of_weights_are_swapped_on_all_ranks(outcome: Outcome) -> None:
    for found in outcome.results("swapped_averages"):
        assert max(found.values()) <= ROUNDED, found


def test_each_rank_holds_its_share_of_the_state(outcome: Outcome) -> None:
    shares = [found[0] for found in outcome.results("memory")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert max(shares) <= 1.02 / len(shares)


def test_what_cannot_be_shared_or_kept_is_refused(outcome: Outcome) -> None:
    for unknown, wrong, checkpoint, elastic in outcome.results("refused"):
        assert 'pass shard_update="elements"' in unknown
        assert "Received: optimizer='Own'" in unknown
        assert 'shard_update must be "auto", True, False, "elements" or "variables"' in wrong
        assert 'model.save("model.keras")' in checkpoint
        assert "leave out process_set or shard_update=True" in elastic
