"""`hvkeras run --data-parallel`: scripts for one process train on several ranks with the result of one process.

The scripts (`data_parallel_scripts`) know nothing of hvkeras. Each one runs in one process and on ranks, in folders of
its own. Without `NOISE=off`, ranks draw other numbers than one process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Outcome, results
from launch.data_parallel_scripts import DEADLINE, SCRIPTS, SEED, SEED_VARIABLE, SEEDED, environment
from launch.hvkeras_run import run


@dataclass(frozen=True)
class Expected:
    """What is expected of a script on ranks.

    Attributes:
        outcome: `exact`: the result of one process. `named`: a sentence says what is not divided among the ranks; if
            the script runs to its end nevertheless, its result is that of one process.
        seeds_itself: Whether the script sets its seeds; otherwise both runs get the same.
        words: Regular expressions: words of what hvkeras says about the script, one for each sentence.
    """

    outcome: str = "exact"
    seeds_itself: bool = True
    words: tuple[str, ...] = ()


MEANS = r"{}\.{} must compute means over the rows of its batch"
EXPECTED = {
    # Arrays, validation_split, evaluate, predict
    "mnist_convnet": Expected(seeds_itself=False),
    # tf.data with TextVectorization, masks, LSTM and GRU, AUC
    "text_classification": Expected(),
    # Folders of images, a frozen backbone and its fine-tuning
    "transfer_learning": Expected(seeds_itself=False),
    # Dictionaries of columns, weights of classes and samples, callbacks that stop and save
    "structured_data": Expected(),
    # A train_step with metrics of its own
    "vae": Expected(seeds_itself=False, words=(MEANS.format("VAE", "train_step"),)),
    # Two optimizers in a train_step, which concatenates samples; pictures after each epoch
    "dcgan": Expected(words=(MEANS.format("GAN", "train_step"),)),
    # A penalty on gradients, several steps of one model
    "wgan_gp": Expected(seeds_itself=False, words=(MEANS.format("WGAN", "train_step"),)),
    # PyDataset with threads, BatchNormalization, MeanIoU and a metric function
    "segmentation": Expected(),
    # Windows of a series, LSTM, R2Score
    "timeseries": Expected(),
    # Layers and a schedule of its own, clipping, moving averages
    "transformer": Expected(seeds_itself=False),
    # A loss in which the samples of a batch depend on each other
    "contrastive": Expected(seeds_itself=False),
    # A compute_loss, and a train_step and test_step of its own
    "distillation": Expected(words=(MEANS.format("Distiller", "compute_loss"),
                                    MEANS.format("OlderDistiller", "train_step"))),
    # Generators, several losses, add_loss, steps_per_execution, export
    "multi_output": Expected(),
    # Metrics, a loss and callbacks of its own; train_on_batch
    "own_callbacks": Expected(seeds_itself=False),
    # GradientTape and apply_gradients outside of fit
    "custom_loop": Expected("named", words=(r"a training loop of this script is not distributed .*custom_loop\.py",)),
}
QUICK = ("mnist_convnet",)
MOST_SEEDS = 10
EXACT = {"NOISE": "off", "FLOAT64": "1"}
ROUNDED = {"NOISE": "off"}


@pytest.fixture(scope="session")
def one_process(launch_once: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Run a script in one process, once per session and settings."""

    def run_once(name: str, settings: Mapping[str, str]) -> Outcome:
        script = SCRIPTS / f"{name}.py"
        seed = settings.get(SEED_VARIABLE, str(SEED))
        command = (script, ()) if EXPECTED[name].seeds_itself else (SEEDED, (seed, str(script)))
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


def require_sentences(job: Job, words: tuple[str, ...]) -> None:
    """Assert that hvkeras has said what is expected about the script, once, and nothing else."""
    said = [line for line in job.done.stderr.splitlines() if re.search(r"\bhvkeras: ", line)
            and not re.search("hvkeras: (backend|data parallel: each rank computes)", line)]
    assert len(said) == len(words), said
    for pattern in words:
        assert len([line for line in said if re.search(pattern, line)]) == 1, (pattern, said)


def require_same_output(job: Job, alone: Outcome) -> None:
    """Assert that the job has left the files of one process, and has printed each of its lines once."""
    assert results.files(job.folder) == results.files(alone.cwd)
    found, expected = results.lines_of(job.done.stdout), results.lines_of(alone.stdout(0))
    assert found == expected, {"missing": expected - found, "superfluous": found - expected}


def cases(ranks: int, mark: Any, quick: bool = False) -> list[Any]:
    return [pytest.param(name, ranks, marks=() if quick and name in QUICK else mark) for name in EXPECTED]


@pytest.mark.parametrize(("script", "ranks"), [*cases(2, pytest.mark.slow, quick=True), *cases(3, pytest.mark.slow)])
def test_the_result_is_that_of_one_process(script: str, ranks: int, one_process: Callable[..., Outcome],
                                           tmp_path: Path) -> None:
    job, expected = on_ranks(script, ranks, EXACT, tmp_path), EXPECTED[script]
    if expected.outcome == "exact":
        job.require_success()
    require_sentences(job, expected.words)
    if job.done.returncode:
        return
    alone = one_process(script, EXACT)
    apart = results.differences(results.arrays(job.folder), results.arrays(alone.cwd), 1e-8)
    assert apart == []
    apart = results.different_files(job.folder, alone.cwd, 1e-8)
    assert apart == []
    require_same_output(job, alone)


@pytest.mark.parametrize(("script", "ranks"), [*cases(2, pytest.mark.slow), *cases(3, pytest.mark.nightly)])
def test_in_float32_weights_differ_by_rounding(script: str, ranks: int, one_process: Callable[..., Outcome],
                                               tmp_path: Path) -> None:
    if EXPECTED[script].outcome != "exact":
        pytest.skip("judged in float64")
    job = on_ranks(script, ranks, ROUNDED, tmp_path)
    job.require_success()
    alone, perturbed = (results.weights(results.arrays(one_process(script, ROUNDED | more).cwd))
                        for more in ({}, {"PERTURB": "1e-7"}))
    found = results.weights(results.arrays(job.folder))
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in alone.items()}
    assert results.root_mean_square(found, alone) <= 30 * results.root_mean_square(perturbed, alone)


@pytest.mark.parametrize(("script", "ranks"), cases(2, pytest.mark.nightly))
def test_with_noise_all_is_there(script: str, ranks: int, one_process: Callable[..., Outcome], tmp_path: Path) -> None:
    if EXPECTED[script].outcome != "exact":
        pytest.skip("judged in float64")
    job = on_ranks(script, ranks, {}, tmp_path)
    job.require_success()
    alone = one_process(script, {})
    found, expected = results.arrays(job.folder), results.arrays(alone.cwd)
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in
                                                                    expected.items()}
    assert all(np.isfinite(value).all() for value in found.values() if value.dtype.kind == "f")
    require_same_output(job, alone)
    if not EXPECTED[script].seeds_itself:
        seeds: list[Mapping[str, Any]] = [expected]
        while outside := outside_of_spread(found, seeds):  # three seeds may lie close to each other by chance
            assert len(seeds) < MOST_SEEDS, outside
            more = {SEED_VARIABLE: str(SEED + len(seeds))}
            seeds.append(results.arrays(one_process(script, more).cwd))


def outside_of_spread(found: Mapping[str, Any], seeds: list[Mapping[str, Any]]) -> list[object]:
    """Return the metrics whose last value is farther from those of other seeds than these are apart."""
    outside: list[object] = []
    for name in (name for name in found if name.startswith("history.")):
        last = [float(arrays[name][-1]) for arrays in seeds]
        spread = max(last) - min(last)
        if not min(last) - spread <= float(found[name][-1]) <= max(last) + spread:
            outside.append((name, found[name][-1], last))
    return outside


@pytest.mark.parametrize("script", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.nightly)
                                    for name in EXPECTED])
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
