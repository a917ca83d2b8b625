"""`hvd.strategy` under each launcher, and jobs in which a rank is missing, fails or is stopped."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome, start_job
from launch.hvkeras_run import run, warm_ranks

WORKERS = Path(__file__).parent / "workers"
SPANNING = WORKERS / "spanning.py"
# Rank 0's last line about rank 1.
WORDS = {
    "raise": r"failed with ValueError: the sky is falling",
    "kill": r"ended unexpectedly \(killed, crashed, or out of memory\)",
    "stop": r"gave no sign of life for 5 s \(stopped, frozen or cut off\)",
}


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("HINT: ")][-1]


@pytest.mark.parametrize(("launcher", "arguments"), [
    pytest.param("tf_config", (), marks=pytest.mark.slow), ("hvkeras_run", ("after init",)),
    pytest.param("mpirun", (), marks=pytest.mark.slow),
    pytest.param("horovodrun_gloo", (), marks=pytest.mark.nightly),
], ids=["tf_config", "hvkeras_run-after-init", "mpirun", "horovodrun_gloo"])
def test_one_call_spans_the_ranks_of_every_launcher(
    launcher: str, arguments: tuple[str, ...], launch: Callable[..., Outcome]
) -> None:
    outcome = launch(launcher, SPANNING, arguments, np=2)
    assert re.fullmatch(r"2 replicas, \[0, 1\], loss \d\.\d{5}\n", outcome.stdout(0))
    assert outcome.stdout(0) == outcome.stdout(1)
    # `init()` had chosen another engine, which runs together with the strategy.
    assert ("backend native" if arguments else "backend tfdist") in outcome.stderr(0)


@pytest.mark.parametrize("how", ["raise", pytest.param("kill", marks=pytest.mark.slow),
                                 pytest.param("stop", marks=pytest.mark.nightly)])
def test_the_survivors_last_line_names_the_rank_that_failed(how: str, tmp_path: Path) -> None:
    with start_job("tf_config", SPANNING, (how,), np=2, folder=tmp_path, expect_failure=True, deadline=90.0,
                   env={"HVKERAS_LIVENESS_TIMEOUT": "5"}, cold=how == "kill") as job:
        job.wait_for(1, "2 replicas")
        if how == "stop":
            pid = job.pid(1)
            job._processes[0].wait(timeout=60)
            os.kill(pid, signal.SIGKILL)  # the test must: the rank is stopped, and has no launcher
        outcome = job.wait()
    assert re.fullmatch(rf"hvkeras: rank 0 on \S+ ends because rank 1 on \S+ \(pid \d+\) {WORDS[how]}",
                        last_line(outcome.stderr(0)))


@pytest.mark.parametrize("launcher", [pytest.param("hvkeras_run", marks=pytest.mark.nightly),
                                      pytest.param("tf_config", marks=pytest.mark.slow)])
def test_a_rank_that_is_late_for_a_collective_of_a_strategy_is_named(
    launcher: str, launch: Callable[..., Outcome]
) -> None:
    outcome = launch(launcher, SPANNING, ("sleep",), np=3, expect_failure=True, env={"HVKERAS_STALL_SHUTDOWN": "6"})
    for rank in range(3):
        assert re.search(r"rank 1 on \S+ \(pid \d+\) has not entered a collective in which rank [02] has waited longer"
                         r" than HVKERAS_STALL_SHUTDOWN allows \(6 s\): it is at \S*spanning.py:\d+ in <module>:"
                         r" time.sleep\(300\)", last_line(outcome.stderr(rank)))


@pytest.mark.slow
def test_a_rank_that_is_late_for_a_step_of_fit_is_named(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", SPANNING, ("late",), np=2, expect_failure=True,
                     env={"HVKERAS_STALL_SHUTDOWN": "5"})
    for rank in range(2):
        assert re.search(r"rank 1 on \S+ \(pid \d+\) has not entered train_step of fit \(\S*spanning.py:\d+ in \S+\),"
                         r" in which rank 0 has waited 5 s for it", last_line(outcome.stderr(rank)))


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with start_job("tf_config", SPANNING, np=2, folder=tmp_path, expect_failure=True, start_order=[0],
                   env={"HVKERAS_START_TIMEOUT": "3"}) as job:
        outcome = job.wait(60.0)
    assert re.search(r"All 2 ranks must arrive within 3 s, but worker 1 \(localhost:\d+\) did not",
                     last_line(outcome.stderr(0)))


def test_a_script_of_tf_distribute_alone_gets_a_tf_config(tmp_path: Path) -> None:
    command = warm_ranks([sys.executable, str(WORKERS / "plain_strategy.py")])
    done = run(["-np", "2", "--tf-config", *command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] worker 0 has 3.0", "[1] worker 1 has 3.0"]


@pytest.mark.slow
def test_a_worker_that_fails_ends_a_job_of_tf_distribute_alone(tmp_path: Path) -> None:
    command = warm_ranks([sys.executable, str(WORKERS / "plain_strategy.py"), "fail"])
    done = run(["-np", "2", "--tf-config", *command], tmp_path)
    assert done.returncode == 1
    assert re.search(r"hvkeras run: rank 1 on \S+ \(pid \d+\) failed\nTraceback", done.stderr)
    assert "ValueError: the sky is falling" in done.stderr
