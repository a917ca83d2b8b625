"""Errors at the start: one clear message on every rank that can detect them."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

from harness import start_job

WORKERS = Path(__file__).parent / "workers"
MEET = WORKERS / "meet.py"


def failing(tmp_path, launcher="tf_config", arguments=(), np=2, worker=MEET, **options):
    options = {"backend": "tfdist"} | options
    with start_job(launcher, worker, arguments, np=np, folder=tmp_path, expect_failure=True, deadline=60.0,
                   **options) as job:
        return job.wait()


def tf_config(*addresses, index=0):
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})}


def test_a_missing_worker_is_reported_while_waiting_and_named_in_the_error(tmp_path):
    outcome = failing(tmp_path, np=3, start_order=(0, 1), env={"HVKERAS_START_TIMEOUT": "5"})
    for rank in (0, 1):
        assert re.search(r"waiting for worker 2 \(localhost:\d+\), \d+ s of 5 s", outcome.stderr(rank))
        assert re.search(r"PeerError: All 3 ranks must arrive within 5 s, but worker 2 \(localhost:\d+\) did"
                         r" not\.\nHINT|in the same way|ends because", outcome.stderr(rank))


@pytest.mark.slow
def test_a_missing_chief_is_reported_too(tmp_path):
    outcome = failing(tmp_path, cold=True, start_order=(1,), env={"HVKERAS_START_TIMEOUT": "5"})
    assert re.search(r"waiting for worker 0 \(localhost:\d+\): .*, 3 s of 5 s", outcome.stderr(1))
    assert re.search(r"PeerError: All ranks must connect within 5 s, but there is no answer from worker 0",
                     outcome.stderr(1))


@pytest.mark.parametrize(("launcher", "backend", "cold"), [
    ("mpirun", "tfdist", False), ("mpirun", "horovod", False),
    pytest.param("horovodrun_gloo", "tfdist", True, marks=pytest.mark.nightly)])
def test_a_rank_that_never_calls_init_is_named(tmp_path, launcher, backend, cold):
    worker = WORKERS / "late.py"
    outcome = failing(tmp_path, launcher, worker=worker, cold=cold, backend=backend, env={"HVKERAS_START_TIMEOUT": "3"})
    assert re.search(r"All 2 ranks must arrive within 3 s, but rank 1 did not", outcome.stderr(0))


@pytest.mark.slow
def test_two_workers_with_one_index_are_distinguished(tmp_path):
    ports = []
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
            ports.append(each.getsockname()[1])
    cluster = tf_config(*(f"localhost:{port}" for port in ports))
    outcome = failing(tmp_path, env=cluster | {"HVKERAS_START_TIMEOUT": "5"})
    told = outcome.stderr(0) + outcome.stderr(1)
    assert re.search(r"two processes claim rank 0|The port that TF_CONFIG gives to worker 0", told)
    assert all(outcome.exit_codes)


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1], taken.getsockname()[1]]
        free.close()
        cluster = [f"localhost:{port}" for port in ports]
        outcome = failing(tmp_path, env={"HVKERAS_START_TIMEOUT": "5"},
                          rank_env={rank: tf_config(*cluster, index=rank) for rank in (0, 1)})
    assert re.search(rf"MachineError: The port that TF_CONFIG gives to worker 1 \(localhost:{ports[1]}\) must be free",
                     outcome.stderr(1))
    assert "\nHINT: another task with this index runs already, or another program uses it" in outcome.stderr(1)


def test_a_malformed_tf_config_stops_before_anything_connects(tmp_path):
    outcome = failing(tmp_path, "none", np=1, cold=True, env={"TF_CONFIG": "{'cluster': 1}"})
    assert "UsageError: TF_CONFIG must be JSON" in outcome.stderr(0) and "HINT" in outcome.stderr(0)


def test_a_wrong_backend_name_lists_the_valid_ones(tmp_path):
    outcome = failing(tmp_path, "none", np=1, backend="nccl")
    assert "UsageError: The backend must be one of auto, native, horovod, tfdist, local" in outcome.stderr(0)


def test_local_cannot_serve_two_ranks_and_says_what_can(tmp_path):
    outcome = failing(tmp_path, backend="local")
    said = outcome.stderr(0) + outcome.stderr(1)
    assert re.search(r"local serves one process and TF_CONFIG started 2; use tfdist or horovod", said)


def test_ranks_must_ask_for_one_backend(tmp_path):
    outcome = failing(tmp_path, backend="", rank_env={0: {"HVKERAS_BACKEND": "tfdist"},
                                                      1: {"HVKERAS_BACKEND": "horovod"}})
    for rank in (0, 1):
        assert "All ranks must request the same backend" in outcome.stderr(rank) or \
            "All ranks must request the same backend" in outcome.stderr(1 - rank)
        assert re.search("rank_0='tfdist', rank_1='horovod'|in the same way", outcome.stderr(rank))


@pytest.mark.slow
def test_init_after_tensorflow_was_used_names_the_line_to_move(tmp_path):
    outcome = failing(tmp_path, cold=True, arguments=("busy",))
    said = outcome.stderr(0) + outcome.stderr(1)  # one error: whoever fails first tells it
    assert "must start before TensorFlow is used" in said
    assert "HINT: move hvd.init(), or hvd.strategy(), up, right after the imports" in said


def test_an_unknown_setting_is_an_error(tmp_path):
    outcome = failing(tmp_path, "none", np=1, env={"HVKERAS_BAKEND": "tfdist"})
    assert "HINT: did you mean HVKERAS_BACKEND" in outcome.stderr(0)


def test_a_launcher_of_another_mpi_is_an_error_not_n_single_jobs(tmp_path):
    """MPICH's mpirun with an mpi4py that loads Open MPI, and an Open MPI that reports another size."""
    outcome = failing(tmp_path, "none", np=1, env={"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0",
                                                   "MPI_LOCALNRANKS": "2"})
    assert re.search(r"MachineError: \S.* and the MPI library that Python loads must belong together\. Received:"
                     r" library='Open MPI", outcome.stderr(0))


def test_a_launcher_that_announces_more_ranks_than_mpi_counts_is_an_error(tmp_path):
    announced = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                 "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # and pip's Open MPI finds its files
    outcome = failing(tmp_path, "none", np=1, env=announced)
    assert re.search(r"MachineError: mpirun \(Open MPI\) announced 2 ranks, but the MPI library that Python loads"
                     r" counts 1", outcome.stderr(0))


def test_variables_that_cannot_be_read_are_an_error(tmp_path):
    outcome = failing(tmp_path, "none", np=1, env={"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"})
    assert "UsageError" in outcome.stderr(0) and "OMPI_COMM_WORLD_RANK" in outcome.stderr(0)


@pytest.mark.parametrize(("environ", "missing"), [
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
     "HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT are"),
    ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
     "SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES are"),
], ids=["horovodrun", "slurm"])
def test_half_of_a_launchers_variables_is_an_error_not_a_job_of_one_rank(tmp_path, environ, missing):
    outcome = failing(tmp_path, "none", np=1, env=environ)
    assert re.search(f"Error: A process that .* starts must get all of its variables, but {missing} missing",
                     outcome.stderr(0))


@pytest.mark.parametrize(("secret", "text"), [
    ("", "must share a secret"), ("mine", "HVKERAS_SECRET must have at least 16 bytes")])
def test_several_hosts_without_a_secret_are_refused(tmp_path, secret, text):
    cluster = ["10.255.255.1:2222", f"{socket.gethostname()}:2223"]
    outcome = failing(tmp_path, "none", np=1, env={**tf_config("localhost:29", *cluster[:1]), "HVKERAS_SECRET": secret})
    assert text in outcome.stderr(0) and 'python -c "import secrets; print(secrets.token_hex())"' in outcome.stderr(0)


def test_a_folder_for_the_secret_that_others_may_read_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    os.chmod(folder, 0o755)
    outcome = failing(tmp_path, env={"HVKERAS_RENDEZVOUS_DIR": str(folder), "HVKERAS_START_TIMEOUT": "5"})
    assert "must belong to you alone" in outcome.stderr(0) and f"chmod 700 {folder}" in outcome.stderr(0)
