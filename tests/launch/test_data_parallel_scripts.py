"""`hvkeras run --data-parallel`: scripts for one process train on several ranks with the result of one process.

The scripts (`data_parallel_scripts`) know nothing of hvkeras. Each one runs in one process and on ranks, in folders of
its own. Noise is on: ranks draw the numbers of one process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome, results
from harness.launchers import BIN, clean_environment
from launch.data_parallel_scripts import DEADLINE, MPIRUN, SCRIPTS, SEED, SEED_VARIABLE, SEEDED, environment
from launch.hvkeras_run import run

# The scripts that set no seeds; both runs get the same.
UNSEEDED = ("contrastive", "mnist_convnet", "own_callbacks", "transfer_learning", "transformer", "vae", "wgan_gp")
ALL = sorted(path.stem for path in SCRIPTS.glob("*.py"))
TOLERANCES = {"distillation": 1e-6}  # the teacher's biases, below, are a part of what it predicts
ZEROS = {
    # biases of keys of attention, which Softmax removes
    "transformer": (5, 25),
    # biases of convolutions before BatchNormalization, which removes them: of the teacher and of two students
    "distillation": (3, 13, 23),
    # the same, of the model and of the best one
    "segmentation": (1, 8, 15, 24, 31, 39, 47, 55, 65, 72, 79, 88, 95, 103, 111, 119),
}
"""Numbers of weights whose gradient is zero by mathematics: of those, rounding decides."""
ZERO = 1e-6
QUICK = ("mnist_convnet",)
SAMPLE = ("mnist_convnet", "transformer", "wgan_gp")  # on other backends, and under mpirun
EXACT = {"FLOAT64": "1"}


@pytest.fixture(scope="session")
def one_process(launch_once: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Run a script in one process, once per session and settings."""

    def run_once(name: str, settings: Mapping[str, str]) -> Outcome:
        script = SCRIPTS / f"{name}.py"
        seed = settings.get(SEED_VARIABLE, str(SEED))
        command = (SEEDED, (seed, str(script))) if name in UNSEEDED else (script, ())
        return launch_once("none", *command, np=1, env=environment(settings), cold=True, deadline=DEADLINE)

    return run_once


@dataclass(frozen=True)
class Job:
    """A finished job: its folder, and what the launcher has printed."""

    folder: Path
    done: subprocess.CompletedProcess[str]

    def require_success(self) -> None:
        assert self.done.returncode == 0, f"{self.done.stdout[-2000:]}\n{self.done.stderr[-6000:]}"


def on_ranks(name: str, ranks: int, settings: Mapping[str, str], folder: Path) -> Job:
    """Run a script on ranks."""
    cwd = folder / "cwd"
    cwd.mkdir()
    done = run(["--data-parallel", "-np", str(ranks), sys.executable, str(SCRIPTS / f"{name}.py")], cwd,
               environment(settings) | {"TMPDIR": str(folder)}, deadline=DEADLINE)
    return Job(cwd, done)


def under_mpirun(name: str, settings: Mapping[str, str], folder: Path) -> Job:
    """Run a script on two ranks of `mpirun`."""
    cwd = folder / "cwd"
    cwd.mkdir()
    command = [*MPIRUN, "-np", "2", str(BIN / "hvkeras"), "exec", "--data-parallel", str(SCRIPTS / f"{name}.py")]
    done = subprocess.run(command, cwd=cwd, env=clean_environment(cwd) | environment(settings) | {
        "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=DEADLINE, check=False)
    return Job(cwd, done)


def require_no_sentences(job: Job) -> None:
    """Assert that hvkeras has nothing to say about the script."""
    said = [line for line in job.done.stderr.splitlines() if re.search(r"\bhvkeras: ", line)
            and not re.search("hvkeras: (backend|data parallel: each rank computes)", line)]
    assert said == []


def require_same_output(job: Job, alone: Outcome) -> None:
    """Assert that the job has left the files of one process, and has printed each of its lines once."""
    assert results.files(job.folder) == results.files(alone.cwd)
    found, expected = results.lines_of(job.done.stdout), results.lines_of(alone.stdout(0))
    assert found == expected, {"missing": expected - found, "superfluous": found - expected}


def cases(ranks: int, mark: Any, quick: bool = False) -> list[Any]:
    return [pytest.param(name, ranks, marks=() if quick and name in QUICK else mark) for name in ALL]


@pytest.mark.parametrize(("script", "ranks"), [*cases(2, pytest.mark.slow, quick=True), *cases(3, pytest.mark.nightly),
                                               *cases(4, pytest.mark.nightly)])
def test_the_result_is_that_of_one_process(script: str, ranks: int, one_process: Callable[..., Outcome],
                                           tmp_path: Path) -> None:
    require_same_result(on_ranks(script, ranks, EXACT, tmp_path), script, one_process(script, EXACT))


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["horovod", "tfdist", "native, mpirun", "horovod, mpirun"])
@pytest.mark.parametrize("script", SAMPLE)
def test_the_result_is_that_of_one_process_on_every_engine(script: str, engine: str, tmp_path: Path,
                                                           one_process: Callable[..., Outcome]) -> None:
    backend, _, launcher = engine.partition(", ")
    settings = EXACT | {"HVKERAS_BACKEND": backend}
    job = under_mpirun(script, settings, tmp_path) if launcher else on_ranks(script, 2, settings, tmp_path)
    require_same_result(job, script, one_process(script, EXACT))
    assert f"hvkeras: backend {backend} (" in job.done.stderr


def require_same_result(job: Job, script: str, alone: Outcome) -> None:
    """Assert that a job of a script has succeeded without a word, with the numbers and files of one process."""
    job.require_success()
    require_no_sentences(job)
    found, wanted = results.arrays(job.folder), results.arrays(alone.cwd)
    for number in ZEROS.get(script, ()):
        name = f"weight.{number:03d}"
        assert max(results.root_mean_square({name: arrays.pop(name)}) for arrays in (found, wanted)) < ZERO
    assert results.differences(found, wanted, TOLERANCES.get(script, 1e-8), 0.0) == []
    assert results.different_files(job.folder, alone.cwd, 1e-8) == []
    require_same_output(job, alone)


@pytest.mark.parametrize("script", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.nightly)
                                    for name in ALL])
def test_one_process_repeats_itself_and_a_small_change_is_noticed(script: str, one_process: Callable[..., Outcome],
                                                                  ) -> None:
    alone, again, changed = (one_process(script, EXACT | more) for more in ({}, {"AGAIN": "1"}, {"PERTURB": "1e-5"}))
    expected = results.arrays(alone.cwd)
    assert results.differences(results.arrays(again.cwd), expected, 0.0) == []
    assert results.different_files(again.cwd, alone.cwd, 0.0) == []
    assert any(line.startswith("weight.") for line in results.differences(results.arrays(changed.cwd), expected, 1e-8))
    for other in (again, changed):
        assert results.files(other.cwd) == results.files(alone.cwd)
        assert results.lines_of(other.stdout(0)) == results.lines_of(alone.stdout(0))
