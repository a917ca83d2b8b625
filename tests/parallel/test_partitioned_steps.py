"""Whole training steps of which each real rank computes its part are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome
from unit.partition.steps import STEPS

WORKER = Path(__file__).parent / "workers" / "partitioned_steps.py"
LAUNCHER = {"tfdist": "tf_config", "horovod": "hvkeras_run", "native": "hvkeras_run"}
RUNS = {"native-2": ("native", 2), "native-4": ("native", 4), "horovod-2": ("horovod", 2), "tfdist-2": ("tfdist", 2)}
QUICK = {"native-2": ("cnn", "contrastive"), "horovod-2": ("own loop",), "tfdist-2": ("lambda",)}
SLOW = {"native-2": ("mlp", "transformer", "lstm", "lambda", "own loop", "dice", "gan"),
        "native-4": ("cnn", "transformer", "contrastive", "own loop", "gan"), "horovod-2": ("cnn", "contrastive"),
        "tfdist-2": ("cnn", "own loop")}


def _check(run: str, names: tuple[str, ...], launch_once: Callable[..., Outcome]) -> None:
    assert names
    backend, size = RUNS[run]
    outcome = launch_once(LAUNCHER[backend], WORKER, names, np=size, backend=backend)
    results = outcome.results("partitioned")
    for name in names:
        differences, digests, states, rounds = zip(*(of_rank[name] for of_rank in results), strict=True)
        assert all(found == [] for found in differences), (name, differences)
        assert len(set(digests)) == 1, f"{name}: the ranks' plans differ"
        assert len(set(states)) == 1, f"{name}: the ranks' states differ in bits"
        assert max(rounds) <= STEPS[name].rounds


@pytest.mark.parametrize("run", QUICK)
def test_a_step_on_real_ranks_is_that_of_one_process(run: str, launch_once: Callable[..., Outcome]) -> None:
    _check(run, QUICK[run], launch_once)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_other_steps_are_those_of_one_process(run: str, launch_once: Callable[..., Outcome]) -> None:
    _check(run, SLOW[run], launch_once)


@pytest.mark.nightly
@pytest.mark.parametrize("run", RUNS)
def test_the_last_steps_are_those_of_one_process(run: str, launch_once: Callable[..., Outcome]) -> None:
    _check(run, tuple(name for name in STEPS if name not in (*QUICK.get(run, ()), *SLOW[run])), launch_once)
