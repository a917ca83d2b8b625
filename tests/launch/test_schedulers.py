"""Environment variables of schedulers, with real ranks: torchrun, a Slurm step, an Indexed Job.

Tests of the schedulers themselves are in tests/clusters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness import hosts as machines
from harness import start_job, warm
from harness.launchers import clean_environment
from harness.pods import JOB, SERVICE, pods

WORKER = Path(__file__).parent / "workers" / "meet.py"
SECRET = {"HVKERAS_SECRET": "not a secret outside of this test"}


def facts(text):
    return json.loads(re.findall(r"FACTS (\{.*?\})", text)[0])


@pytest.mark.parametrize(("scheduler", "backend", "launcher"), [
    ("torchrun_variables", "native", "torchrun or the like"), ("slurm_step", "tfdist", "srun (Slurm)")])
def test_ranks_of_one_host_meet(launch, scheduler, backend, launcher):
    outcome = launch(scheduler, WORKER, ("again",), np=2, backend=backend)
    for rank in (0, 1):
        found = facts(outcome.stdout(rank))
        assert (found["rank"], found["local"], found["sum"]) == (rank, [rank, 2], 3.0)
        assert (found["backend"], found["launcher"]) == (backend, launcher)
    assert f"2 ranks on 1 host, launched by {launcher}" in outcome.stderr(0)


def test_where_the_local_size_is_not_said_a_secret_lets_ranks_meet_at_the_port(launch):
    without = {"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": "", **SECRET}
    outcome = launch("torchrun_variables", WORKER, np=2, backend="native", env=without)
    assert [facts(outcome.stdout(rank))["sum"] for rank in (0, 1)] == [3.0, 3.0]


def test_a_rank_that_is_missing_is_named(tmp_path):
    with start_job("torchrun_variables", WORKER, np=2, folder=tmp_path, backend="native", start_order=(1,),
                   env={"HVKERAS_START_TIMEOUT": "4"}, expect_failure=True) as job:
        outcome = job.wait()
    assert "no answer from rank 0 (it has not announced itself)" in outcome.stderr(1).splitlines()[-2]


@pytest.fixture
def job():
    """The pods of an Indexed Job."""
    if reason := machines.missing():
        pytest.skip(reason)
    with pods() as made:
        yield made


def start(job, index, folder, **extra):
    return job.start(index, [*warm.python(clean_environment(folder)), str(WORKER)], folder, **extra)


def test_pods_of_an_indexed_job_meet_once_the_name_of_the_first_resolves(job, tmp_path):
    late = start(job, 1, tmp_path)
    waiting = ""
    while "its name does not resolve yet" not in waiting and (line := late.stdout.readline()):
        waiting += line
    first = start(job, 0, tmp_path)
    job.resolve()
    outputs = [first.communicate(timeout=90)[0], waiting + late.stdout.read()]
    for rank, output in enumerate(outputs):
        found = facts(output)
        assert (found["rank"], found["local"], found["cross"], found["sum"]) == (rank, [0, 1], [rank, 2], 3.0)
    assert "2 ranks on 2 hosts, launched by a Kubernetes Indexed Job" in outputs[0]
    assert re.search(rf"waiting for pod {JOB}-0 \(rank 0\), which serves the control channel at {JOB}-0\.{SERVICE}"
                     r":29400: its name does not resolve yet", outputs[1])


def test_pods_without_a_secret_are_told_what_to_set(job, tmp_path):
    output = start(job, 1, tmp_path, HVKERAS_SECRET="").communicate(timeout=60)[0]
    assert "launched by a Kubernetes Indexed Job, must share a secret" in output.splitlines()[-2]
