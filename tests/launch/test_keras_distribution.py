"""Keras's distribution API on TensorFlow: two processes train as one does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from harness import start_job

WORKER = Path(__file__).parent / "workers" / "keras_distribution.py"
IMPORTS = Path(__file__).parent / "workers" / "keras_before_hvkeras.py"


@pytest.fixture(params=["keras_variables", pytest.param("hvkeras_run", marks=pytest.mark.slow)])
def two(request, launch_once):
    """Two processes: started by hand, with the variables that initialize() reads, and by a launcher, without it."""
    arguments = ("initialize",) * (request.param == "keras_variables")
    return launch_once(request.param, WORKER, arguments, np=2, env={"HVKERAS_UNEVEN": "join"})


@pytest.fixture
def one(launch_once):
    return launch_once("none", WORKER, ("initialize",), np=1)


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and left and isinstance(left[0], list):
        return len(left) == len(right) and all(map(same, left, right))
    return np.allclose(left, right, rtol=1e-8, atol=1e-8)


def test_devices_and_processes_are_those_of_the_job(one, two):
    for rank, found in enumerate(two.results("devices")):
        assert found == {"list": ["cpu:0", "cpu:1"], "count": 2, "gpus": [], "processes": 2, "replicas": 2,
                         "shard": rank, "deals": True}
    assert one.result("devices", 0) == {"list": ["cpu:0"], "count": 1, "gpus": [], "processes": 1, "replicas": 1,
                                        "shard": 0, "deals": True}


def test_random_numbers_that_the_script_does_not_seed_are_equal(two):
    first, second = two.results("seeds")
    assert first == second


@pytest.mark.parametrize("check", ["arrays", "other_data"])
def test_two_processes_train_as_one_does(one, two, check):
    expected = one.result(check, 0)
    for found in two.results(check):
        assert same(found, expected)


def test_each_process_passes_whole_batches(one, two):
    for errors in two.results("parts"):
        for error in errors:
            assert "UnsupportedError: On TensorFlow, DataParallel divides the batches of one process" in error
    assert one.result("parts", 0) == ["no error"] * 2


def test_other_distributions_are_refused(one, two):
    for rank, errors in enumerate(two.results("refusals")):
        model_parallel, subset, three, seven, again, current = errors
        assert "UnsupportedError: On TensorFlow, only keras.distribution.DataParallel is supported" in \
            model_parallel
        assert "UnsupportedError: On TensorFlow, DataParallel must be over the devices of all ranks" in subset
        for error in (three, seven):
            assert re.search(rf"UsageError: .* must get the numbers of the job .*: this is process {rank} of 2", error)
        assert (again, current) == ("no error", "None")
    in_one_process = one.result("refusals", 0)
    assert in_one_process[:2] == ["no error"] * 2 and "NUM_PROCESSES" not in in_one_process[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["keras first", "hvkeras first"])
def test_the_order_of_imports_does_not_matter(launch, order):
    outcome = launch("hvkeras_run", IMPORTS, (order,), np=2, cold=True)
    assert [outcome.stdout(rank).split() for rank in (0, 1)] == [["2", "True"]] * 2


def test_arguments_that_contradict_the_launcher_are_an_error(tmp_path):
    variables = {"KERAS_DISTRIBUTION_NUM_PROCESSES": "3"}
    with start_job("hvkeras_run", WORKER, ("initialize",), np=2, folder=tmp_path, env=variables, expect_failure=True,
                   ) as job:
        outcome = job.wait()
    assert "must get the numbers of the job that hvkeras run has started: this is process" in outcome.output
