"""N ranks on shards of a batch train like one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import ENGINES, OLDEST_IN_SOAK, Outcome, pairwise

WORKER = Path(__file__).parent / "workers" / "same_training.py"
TOLERANCE = 2e-5  # relative to the largest weight: float32 sums in another order
LAUNCHER = {"tfdist": "tf_config", "horovod": "hvkeras_run", "native": "hvkeras_run"}
MAIN_CASES = ("sgd_momentum", "adam", "adam_clip_decay", "sparse_adam_clip", "losses_sgd")
KERAS = {"keras3": "0", "tf_keras": "1"}
RUNS = {f"{backend}-{keras}-{size}": (backend, keras, size)
        for backend, keras, size in (*((backend, keras, 2) for backend, keras in pairwise(ENGINES, tuple(KERAS))),
                                     ("native", "keras3", 4), ("horovod", "tf_keras", 4), ("tfdist", "keras3", 4))}
OLDEST = "native-keras3-2"
LONG = ("native-keras3-2", "horovod-tf_keras-2", "tfdist-tf_keras-2", "horovod-tf_keras-4", "tfdist-keras3-4")


def marks(run: str) -> list[Any]:
    """Return marks: with four ranks, `make test-all` runs one engine."""
    marks = [pytest.mark.sample, pytest.mark.slow, *(OLDEST_IN_SOAK if run == OLDEST else ())]
    return [*marks, pytest.mark.nightly] if run in LONG else marks


def differences(launch_once: Callable[..., Outcome], backend: str, keras: str, size: int, *arguments: str) -> list[Any]:
    outcome = launch_once(LAUNCHER[backend], WORKER, arguments, np=size, backend=backend,
                          env={"TF_USE_LEGACY_KERAS": KERAS[keras]})
    found: list[Any] = outcome.results("differences")
    return found


COMPILED = ("adam_clip_decay", "sparse_adam_clip")  # in `make test`


def assert_same(found: list[Any], case: str) -> None:
    for rank, results in enumerate(found):
        difference, moved, _ = results[case]
        assert moved > 100 * TOLERANCE or case.endswith("Adadelta"), f"rank {rank} hardly trained"
        assert difference < TOLERANCE, f"rank {rank} trained otherwise than one process"
    assert len({results[case][2] for results in found}) == 1, "the ranks' weights differ"


@pytest.mark.parametrize("case", MAIN_CASES)
@pytest.mark.parametrize("run", [pytest.param(run, marks=marks(run)) for run in RUNS])
def test_fit_over_shards_gives_the_weights_of_one_process(
    run: str, case: str, launch_once: Callable[..., Outcome]
) -> None:
    backend, keras, size = RUNS[run]
    assert_same(differences(launch_once, backend, keras, size, *MAIN_CASES), case)


OF_EACH_ENGINE = {"native": ("sgd_momentum", "sparse_adam_clip"), "tfdist": ("sgd_momentum",),
                  "horovod": ("sgd_momentum",)}


@pytest.mark.check
@pytest.mark.parametrize(("backend", "cases"), OF_EACH_ENGINE.items(), ids=OF_EACH_ENGINE)
def test_each_engine_trains(backend: str, cases: tuple[str, ...], launch_once: Callable[..., Outcome]) -> None:
    found = differences(launch_once, backend, "keras3", 2, *cases)
    for case in cases:
        assert_same(found, case)


@pytest.mark.parametrize("backend", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES
                                                 if name != "native")])
def test_steps_of_ones_own_give_the_weights_of_one_process(backend: str, launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once(LAUNCHER[backend], WORKER, OF_EACH_ENGINE[backend], np=2, backend=backend,
                          env={"TF_USE_LEGACY_KERAS": KERAS["keras3"]})
    for found in outcome.results("own_steps"):
        for name, difference in found.items():
            if name in ("clipped before the optimizer", "negatives of a rank"):
                assert difference > 100 * TOLERANCE, f"{name}: the page says that this is not one process's result"
            else:
                assert difference < TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_updates_that_xla_compiles_give_the_weights_of_one_process(
    case: str, launch_once: Callable[..., Outcome]
) -> None:
    assert_same(differences(launch_once, "native", "keras3", 2, "--compiled", *COMPILED), case)


@pytest.mark.nightly
@pytest.mark.parametrize("keras", KERAS)
def test_every_optimizer_trains_the_same_where_xla_compiles_its_update(
    keras: str, launch_once: Callable[..., Outcome]
) -> None:
    found = differences(launch_once, "native", keras, 2, "--compiled")
    assert len(found[0]) >= 15
    for case in found[0]:
        if (keras, case) != ("tf_keras", "Nadam"):  # in graphs, it counts traces instead of steps
            assert_same(found, case)


@pytest.mark.nightly
@pytest.mark.parametrize("keras", KERAS)
def test_every_optimizer_trains_the_same(keras: str, launch_once: Callable[..., Outcome]) -> None:
    found = differences(launch_once, "native", keras, 2, "--eager")
    assert len(found[0]) >= 15
    for case in found[0]:
        if case != "sparse_adam_clip":  # in eager mode, it applies the rows of each rank separately, with a warning
            assert_same(found, case)
