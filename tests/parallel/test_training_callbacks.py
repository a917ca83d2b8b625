"""Callbacks on two ranks: learning rates as in one process, averaged logs, and files only from one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import OLDEST_IN_SOAK, Outcome

WORKER = Path(__file__).parent / "workers" / "training_callbacks.py"
TOLERANCE = 2e-5  # relative to the largest weight: float32 sums in another order
RUNS = {
    "keras3-tfdist": ("tf_config", ("tfdist", "0"), ()),
    "keras3-native-few": ("hvkeras_run", ("native", "0"), ("--few",)),
    "tf_keras-native": ("tf_config", ("native", "1"), ()),
    "keras3-horovod": ("hvkeras_run", ("horovod", "0"), ()),
}


MARKS = {"keras3-native-few": (*OLDEST_IN_SOAK, pytest.mark.slow),
         **dict.fromkeys(("keras3-tfdist", "tf_keras-native", "keras3-horovod"), pytest.mark.nightly)}


@pytest.fixture(params=[pytest.param(run, marks=MARKS.get(run, ())) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, (backend, legacy), arguments = RUNS[request.param]
    return launch_once(launcher, WORKER, arguments, np=2, backend=backend, env={"TF_USE_LEGACY_KERAS": legacy})


def test_optimizers_train_as_in_one_process(outcome: Outcome) -> None:
    for found in outcome.results("truth"):
        assert len(found) in (3, 6, 9)
        for case, (difference, moved) in found.items():
            assert moved > 100 * TOLERANCE, f"{case} hardly trained"
            assert difference < TOLERANCE, f"{case} trained otherwise than one process"


def test_training_resumes_where_it_was(outcome: Outcome) -> None:
    assert max(outcome.results("resumed")) < TOLERANCE
    assert outcome.stderr(0).count("0.05 x 2 ranks -> 0.1 over 2 epochs; resumes at epoch 1: 0.0875\n") == 1


def test_the_momentum_correction_matters(outcome: Outcome) -> None:
    assert min(found["apart"] for found in outcome.results("uncorrected")) > 100 * TOLERANCE


def test_rates_are_the_same_on_every_rank(outcome: Outcome) -> None:
    for found in outcome.results("uncorrected"):
        assert found["expected"][:5] == pytest.approx([0.0625, 0.075, 0.0875, 0.1, 0.01])
        assert found["rates"] == pytest.approx(found["expected"])


def test_rank_0_says_once_what_will_happen(outcome: Outcome) -> None:
    said = [line for line in outcome.stderr(0).splitlines() if line.startswith("hvkeras: learning rate")]
    assert said[:4] == [
        "hvkeras: learning rate: 0.05 x 2 ranks -> 0.1 over 2 epochs",
        "hvkeras: learning rate: 0.1 x 0.1 from epoch 2 to 3",
        "hvkeras: learning rate: 0.1 x halving(epoch) from epoch 3 to 4, changing at each step",
        "hvkeras: learning rate: 0.1 x halving(epoch) from epoch 4 on",
    ]
    assert "learning rate" not in outcome.stderr(1)


def test_logs_are_averaged(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("averaged_and_best")):
        assert [found[key] for key in ("mine", "same", "count", "tensor", "only on 1")] == [0.5, 0.1, 7, 1.0, 5.0]
        assert [found[key] for key in ("text", "none", "array")] == [f"rank {rank}", None, [rank]]
        assert found["history"] == [0.5, 0.5, 0.5]
        assert "loss" in found["keys"]
    assert outcome.stderr(0).count("'only on 1' is not a number in the logs of rank 0; its mean is taken over the"
                                   " other") == 1


def test_rank_0_alone_saves_the_best_model(outcome: Outcome) -> None:
    first, second = outcome.results("averaged_and_best")
    assert first["files"] == ["1.keras", "3.keras", "best.weights.h5"]
    assert first["apart"] == [0.0, 0.0]
    assert second["files"] == []
    assert not first["patched"] and not second["patched"]


def test_a_file_that_both_ranks_write_is_reported_once(outcome: Outcome) -> None:
    said = [line for line in outcome.stderr(0).splitlines() if "write to the same path" in line]
    assert len(said) == 1 and "ranks 0, 1 write to the same path with Keras's CSVLogger" in said[0]
    assert f"{outcome.cwd / 'all.csv'}. HINT: " in said[0] and "rank0_callbacks" in said[0]
    assert "write to the same path" not in outcome.stderr(1)
