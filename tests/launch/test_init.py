"""`init()` under every launcher, on every backend: ranks and sizes, in any order of start."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from harness import ENGINES, PAIRS, some_cold, start_job

WORKER = Path(__file__).parent / "workers" / "meet.py"
AGAIN = (("horovodrun_mpi", "tfdist"), ("horovodrun_gloo", "tfdist"))  # horovodrun itself imports TensorFlow


def facts(outcome, rank, time=0):
    # mpirun may print several ranks' output on one line, so search for the JSON itself.
    return json.loads(re.findall(r"FACTS (\{.*?\})", outcome.stdout(rank))[time])


def expected(rank, size, backend):
    return {"rank": rank, "size": size, "local": [rank, size], "cross": [0, 1], "sum": size * (size + 1) / 2,
            "backend": backend}


@pytest.mark.parametrize(("launcher", "backend", "np", "cold"), [
    *some_cold([(*pair, 2) for pair in PAIRS if pair not in AGAIN]), ("hvkeras_run", "native", 4, False),
    *(pytest.param(*pair, 2, False, marks=pytest.mark.slow) for pair in AGAIN),
    pytest.param("mpirun", "horovod", 4, False, marks=pytest.mark.nightly),
    pytest.param("tf_config", "tfdist", 4, False, marks=pytest.mark.slow)])
def test_every_launcher_serves_every_backend(launch, launcher, backend, np, cold):
    outcome = launch(launcher, WORKER, ("again",), np=np, backend=backend, cold=cold)
    for rank in range(np):
        for time in range(2):  # init() after shutdown() joins the same job
            found = facts(outcome, rank, time)
            assert {key: found[key] for key in expected(rank, np, backend)} == expected(rank, np, backend)
            assert found["threads"] == max(1, round(len(os.sched_getaffinity(0)) / np))
    lines = [line for rank in range(np) for line in outcome.stderr(rank).splitlines() if "launched by" in line]
    assert len(lines) == 2 and f"backend {backend} (" in lines[0] and f"{np} ranks" in lines[0]


@pytest.mark.slow
def test_ranks_may_start_in_any_order_and_say_whom_they_wait_for(tmp_path):
    with start_job("tf_config", WORKER, np=3, folder=tmp_path, backend="tfdist", start_order=(2, 1, 0),
                   start_delay=4.0) as job:
        outcome = job.wait()
    assert [facts(outcome, rank)["sum"] for rank in range(3)] == [6.0] * 3
    assert re.search(r"waiting for worker 0 \(localhost:\d+\).*, \d+ s of 60 s", outcome.stderr(2))


def test_the_chief_is_rank_0_and_the_argument_beats_the_environment(launch):
    outcome = launch("tf_config", WORKER, ("argument",), np=2, backend="tfdist", env={"MEET_BACKEND": "horovod"})
    assert [facts(outcome, rank)["backend"] for rank in (0, 1)] == ["horovod", "horovod"]


@pytest.mark.parametrize("launcher", ["tf_config", pytest.param("horovodrun_gloo", marks=pytest.mark.nightly)])
def test_auto_picks_native_within_a_host(launch, launcher):
    outcome = launch(launcher, WORKER, np=2)
    assert facts(outcome, 0)["backend"] == facts(outcome, 1)["backend"] == "native"


def test_one_process_needs_no_launcher_and_no_engine(launch):
    outcome = launch("none", WORKER, np=1, backend="tfdist")
    found = facts(outcome, 0)
    assert (found["backend"], found["size"], found["sum"], found["launcher"]) == ("local", 1, 1.0, "none")


def test_a_launcher_that_announces_one_rank_is_size_1(launch):
    outcome = launch("mpirun", WORKER, np=1)
    assert facts(outcome, 0)["size"] == 1


@pytest.mark.slow
def test_two_jobs_on_one_host_never_connect(tmp_path):
    with start_job("tf_config", WORKER, np=2, folder=tmp_path, backend="tfdist") as one, \
            start_job("mpirun", WORKER, np=2, folder=tmp_path, backend="tfdist") as other:
        outcomes = [one.wait(), other.wait()]
    assert [facts(outcome, rank)["sum"] for outcome in outcomes for rank in (0, 1)] == [3.0] * 4


@pytest.mark.parametrize("backend", [pytest.param(name, marks=() if name == "native" else pytest.mark.slow)
                                     for name in ENGINES])
def test_proxies_do_not_come_between_ranks(launch, backend):
    dead = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"), dead)
    launcher = "horovodrun_gloo" if backend == "tfdist" else "tf_config"
    outcome = launch(launcher, WORKER, np=2, backend=backend, env=proxies)
    assert facts(outcome, 0)["sum"] == 3.0


def test_threads_are_left_alone_when_switched_off_or_set_by_the_user(launch):
    outcome = launch("tf_config", WORKER, np=2, backend="tfdist", env={"HVKERAS_THREADS": "off"})
    assert facts(outcome, 0)["threads"] == 0
