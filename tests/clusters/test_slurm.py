"""A real Slurm with two nodes: steps, batch jobs, arrays, and what happens when a job is ended from outside."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from clusters import slurm_cluster
from harness.launchers import BIN

pytestmark = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())

ROOT = Path(__file__).resolve().parents[2]
MEET = ROOT / "tests" / "launch" / "workers" / "meet.py"
EXAMPLES = ROOT / "examples"
# The ranks of a node go through a relay, as in larger jobs.
TFDIST = {"HVKERAS_BACKEND": "tfdist", "HVKERAS_START_TIMEOUT": "120", "HVKERAS_RELAY_FROM": "2"}
SBATCH = {"PYTHON": sys.executable, "TRAIN": str(EXAMPLES / "resuming.py"), **TFDIST}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def facts(text):
    return sorted((json.loads(found) for found in re.findall(r"FACTS (\{.*?\})", text)), key=lambda fact: fact["rank"])


def check_two_nodes(output, launcher):
    found = facts(output)
    assert [fact["sum"] for fact in found] == [10.0] * 4, output
    assert [fact["local"] for fact in found] == [[0, 2], [1, 2]] * 2
    assert [fact["cross"] for fact in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert f"4 ranks on 2 hosts, launched by {launcher}" in output


@pytest.mark.parametrize("backend", ["native", "tfdist"])
def test_srun_needs_no_other_set_up(slurm, backend):
    output = slurm.command("srun", "-N2", "--ntasks-per-node=2", sys.executable, str(MEET), deadline=150,
                           **TFDIST | {"HVKERAS_BACKEND": backend})
    check_two_nodes(output, "srun (Slurm)")
    assert {fact["backend"] for fact in facts(output)} == {backend}


def test_hvkeras_run_in_a_batch_script_takes_the_jobs_nodes(slurm):
    job = slurm.submit(f"#!/bin/bash\nexec {BIN}/hvkeras run {sys.executable} {MEET}\n", "-N2", "--ntasks-per-node=2",
                       **TFDIST)
    assert slurm.wait_until_over(job, 150) == "COMPLETED", slurm.logs()
    check_two_nodes(slurm.output(job), "hvkeras run")


def test_the_elements_of_an_array_are_jobs_of_their_own(slurm):
    job = slurm.submit(f"#!/bin/bash\nsrun {sys.executable} {MEET}\n", "--array=0-1", "-N2", "--ntasks-per-node=1",
                       "--output=%A_%a.out", **TFDIST)
    for element in ("0", "1"):
        assert slurm.wait_until_over(f"{job}_{element}", 150) == "COMPLETED", slurm.logs()
        assert [fact["sum"] for fact in facts(slurm.output(f"{job}_{element}"))] == [3.0, 3.0]


def test_steps_at_the_same_time_in_one_job_are_jobs_of_their_own(slurm):
    step = f"srun --exact -N2 -n2 -c1 {sys.executable} {MEET}"
    job = slurm.submit(f"#!/bin/bash\n{step} &\n{step} &\nwait\n", "-N2", "--ntasks-per-node=2", **TFDIST)
    assert slurm.wait_until_over(job, 150) == "COMPLETED", slurm.logs()
    assert [fact["sum"] for fact in facts(slurm.output(job))] == [3.0] * 4


def test_a_heterogeneous_step_is_one_job(slurm):
    python = f"{sys.executable} {MEET}"
    job = slurm.submit(f"#!/bin/bash\n#SBATCH -N1 -n1\n#SBATCH hetjob\n#SBATCH -N1 -n2\n"
                       f"srun --het-group=0,1 {python}\n", **TFDIST)
    assert slurm.wait_until_over(job, 150) == "COMPLETED", slurm.logs()
    found = facts(slurm.output(job))
    assert [fact["sum"] for fact in found] == [6.0] * 3
    assert [fact["local"] for fact in found] == [[0, 1], [0, 2], [1, 2]]


def start_training(slurm, *options, epochs=500, **environment):
    """Submits the example, and waits until it trains."""
    job = slurm.submit((EXAMPLES / "slurm" / "train.sbatch").read_text().replace('"$@"', f"--epochs {epochs} \"$@\""),
                       "--nodes=2", "--ntasks-per-node=1", *options, **SBATCH, **environment)
    slurm.wait_for("the third epoch", lambda: "Epoch 3/" in slurm.output(job), 150)
    return job


def resumed_epochs(slurm, job):
    """The epochs with which a job that was started again has resumed."""
    return [int(epoch) for epoch in re.findall(r"training resumes with epoch (\d+)", slurm.output(job))]


def resumed_epoch(slurm, job, before=0):
    """Waits until a job has resumed more often than before; returns the epoch."""
    slurm.wait_for("the resumed training", lambda: len(resumed_epochs(slurm, job)) > before
                   or slurm.state(job) not in ("PENDING", "RUNNING"), 150)
    return resumed_epochs(slurm, job)[before]


def start_now(slurm, job):
    """Spares the test the two minutes that Slurm lets a requeued job wait, but not the end of the run before."""
    slurm.wait_for("the requeued job", lambda: slurm.state(job) == "PENDING", 90)
    slurm.wait_for("the end of all ranks", lambda: not ranks(slurm), 30)
    time.sleep(6)  # Slurm's KillWait, after which nothing is sent to the run before any more
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")


def ranks(slurm):
    """The processes of the ranks, on both nodes."""
    found = [process for index in (0, 1) for process in slurm.processes(index, str(EXAMPLES / "resuming.py"))]
    return [process for process in found if "python" in process.name()]


def test_scancel_ends_all_ranks(slurm):
    job = start_training(slurm)
    slurm.command("scancel", job)
    assert slurm.wait_until_over(job) == "CANCELLED"
    slurm.wait_for("the end of all ranks", lambda: not ranks(slurm), 30)
    assert re.search(r"received SIGTERM|CANCELLED", slurm.output(job))


def test_a_killed_rank_is_named_and_fails_the_job(slurm):
    job = start_training(slurm, "--no-requeue")
    ranks(slurm)[-1].kill()
    assert slurm.wait_until_over(job) == "FAILED"
    assert re.search(r"because rank \d on slurm\d \(pid \d+\) ended unexpectedly", slurm.output(job)), slurm.output(job)


def test_a_job_goes_on_after_its_time_limit(slurm):
    job = start_training(slurm, "--time=1", "--signal=B:USR1@20")
    start_now(slurm, job)
    assert resumed_epoch(slurm, job) >= 3
    slurm.command("scancel", job)
    slurm.wait_until_over(job)


def test_a_job_goes_on_after_a_node_was_lost(tmp_path):
    with slurm_cluster.cluster(tmp_path) as slurm:  # of its own, as a node's daemon is started anew
        job = start_training(slurm)
        before = len(resumed_epochs(slurm, job))  # Slurm may have started it again by itself already
        slurm.lose_node(1)
        slurm.wait_for("the requeued job", lambda: slurm.state(job) == "PENDING", 120)
        slurm.start_node(1)
        start_now(slurm, job)
        assert resumed_epoch(slurm, job, before) >= 2  # the backup is made every 20 steps, and an epoch has 24


def test_hvkeras_run_says_why_srun_cannot_start_a_process(slurm):
    done = slurm.run(f"{BIN}/hvkeras", "run", "-np", "2", "true", SLURM_JOB_NODELIST="slurm[1-2]", SLURM_JOB_ID="4711",
                     HVKERAS_START_TIMEOUT="20")
    assert done.returncode
    assert re.search(r"srun must start a process on every node of the allocation \(.*4711.*node='slurm2'", done.stdout)


def test_a_job_that_gets_no_room_waits_in_the_queue(slurm):
    began = time.monotonic()
    refused = slurm.run("srun", "--immediate=3", "-N2", "--ntasks-per-node=99", "true")
    assert refused.returncode and time.monotonic() - began < 30
