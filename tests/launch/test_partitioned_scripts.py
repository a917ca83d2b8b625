"""Scripts for one process, each function of which several ranks carry out together, have the result of one process.

Noise is on: ranks draw the numbers of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome, results
from harness.launchers import TESTS
from launch.data_parallel_scripts import DEADLINE, SCRIPTS, SEED, environment

PARTITIONED = TESTS / "harness" / "partitioned.py"
SLOW = ("dcgan", "mnist_convnet", "own_callbacks", "structured_data", "transfer_learning")
CASES = [pytest.param(path.stem, marks=pytest.mark.slow if path.stem in SLOW else pytest.mark.nightly)
         for path in sorted(SCRIPTS.glob("*.py"))]
TOLERANCES = {"distillation": 1e-9}  # the teacher's biases, below, are a part of what it predicts

ZEROS = {
    # biases of keys of attention, which Softmax removes
    "transformer": (5, 25),
    # biases of convolutions before BatchNormalization, which removes them: of the teacher and of two students
    "distillation": (3, 13, 23),
    # the same, of the model and of the best one
    "segmentation": (1, 8, 15, 24, 31, 39, 47, 55, 65, 72, 79, 88, 95, 103, 111, 119),
}
"""Numbers of weights whose gradient is zero by mathematics: of those, rounding decides."""
ZERO = 1e-10


def folders(script: str, settings: dict[str, str], launch_once: Callable[..., Outcome]) -> tuple[Path, Path]:
    """Run a script in one process, and on two ranks; return the folders in which the ranks' folders are."""
    arguments = (str(SEED), str(SCRIPTS / f"{script}.py"))
    one, two = (launch_once(launcher, PARTITIONED, arguments, np=size, backend=backend, env=environment(settings),
                            deadline=DEADLINE).cwd
                for launcher, size, backend in (("none", 1, ""), ("hvkeras_run", 2, "native")))
    return one, two


@pytest.mark.parametrize("script", CASES)
def test_the_result_is_that_of_one_process(script: str, launch_once: Callable[..., Outcome]) -> None:
    alone, ranks = folders(script, {"FLOAT64": "1"}, launch_once)
    expected = results.arrays(alone / "rank0")
    zeros = [f"weight.{number:03d}" for number in ZEROS.get(script, ())]
    for rank in range(2):
        found = results.arrays(ranks / f"rank{rank}")
        for name in zeros:
            assert max(results.root_mean_square({name: arrays.pop(name)}) for arrays in (found, dict(expected))) < ZERO
        wanted = {name: value for name, value in expected.items() if name not in zeros}
        assert results.differences(found, wanted, TOLERANCES.get(script, 1e-12), 0.0) == []
        assert results.different_files(ranks / f"rank{rank}", alone / "rank0", 1e-8) == []
    reports = [json.loads((ranks / f"partitioned{rank}.json").read_text()) for rank in range(2)]
    assert reports[0]["divided"]
    assert reports[0] == reports[1]


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["transfer_learning"])
def test_in_float32_weights_differ_by_rounding(script: str, launch_once: Callable[..., Outcome]) -> None:
    alone, ranks = folders(script, {}, launch_once)
    perturbed = launch_once("none", PARTITIONED, (str(SEED), str(SCRIPTS / f"{script}.py")), np=1, backend="",
                            env=environment({"PERTURB": "1e-7"}), deadline=DEADLINE).cwd
    weights = results.weights(results.arrays(alone / "rank0"))
    apart = results.root_mean_square(results.weights(results.arrays(perturbed / "rank0")), weights)
    for rank in range(2):
        found = results.weights(results.arrays(ranks / f"rank{rank}"))
        assert results.root_mean_square(found, weights) <= 30 * apart
