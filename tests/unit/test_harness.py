"""The harness itself: it must see failures, hangs and orphans, or no other test means anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import LaunchError, Outcome, start_job
from harness.checks import names_of_checks

BEHAVE = Path(__file__).parent / "harness_scripts" / "behave.py"



@pytest.fixture(params=["horovodrun_gloo", "tf_config"])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_results_come_back_by_rank_from_outside_the_repository(
    launcher: str, launch_once: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "8")
    outcome = launch_once(launcher, BEHAVE, ("well",), np=2)
    assert outcome.results("rank_and_folder") == [[0, str(outcome.cwd)], [1, str(outcome.cwd)]]
    assert not Path(__file__).is_relative_to(outcome.cwd)
    assert all(len(variables) == 1 for variables in outcome.results("a_set_of_variables"))
    assert outcome.stdout(1).strip() == "rank 1 speaks"


def test_the_failing_rank_is_named_with_its_log(launcher: str, launch: Callable[..., Outcome]) -> None:
    with pytest.raises(LaunchError, match=r"(?s)the first failing rank is 1.*rank 1 was told to raise"):
        launch(launcher, BEHAVE, ("raise",), np=2)


def test_an_expected_failure_returns_the_other_results(launcher: str, launch: Callable[..., Outcome]) -> None:
    outcome = launch(launcher, BEHAVE, ("raise",), np=2, expect_failure=True)
    assert outcome.exit_code != 0
    assert outcome.first_failing == 1
    with pytest.raises(LaunchError, match="rank 1 was told to raise"):
        outcome.results("raises_on_rank_1")


def test_an_unexpected_success_fails(launch: Callable[..., Outcome]) -> None:
    with pytest.raises(LaunchError, match="should fail"):
        launch("tf_config", BEHAVE, ("well",), np=2, expect_failure=True)


def test_a_job_that_never_ends_shows_its_stacks(launcher: str, tmp_path: Path) -> None:
    with start_job(launcher, BEHAVE, ("sleep",), np=2, folder=tmp_path) as job:
        job.wait_for(0, "rank 0 speaks")
        with pytest.raises(LaunchError, match=r"(?s)never ended before its deadline.*Fatal Python error.*behave.py"):
            job.wait(deadline=1)


def test_a_rank_can_be_killed_from_outside(launcher: str, tmp_path: Path) -> None:
    with start_job(launcher, BEHAVE, ("sleep",), np=2, folder=tmp_path, expect_failure=True) as job:
        job.wait_for(1, "rank 1 speaks")
        job.wait_for(0, "rank 0 speaks")
        for rank in (1, 0):
            if launcher == "tf_config" or rank == 1:
                os.kill(job.pid(rank), signal.SIGKILL)
        outcome = job.wait()
    assert outcome.exit_code != 0


def test_an_orphan_is_found_and_killed(launch: Callable[..., Outcome]) -> None:
    with pytest.raises(LaunchError, match=r"left processes behind.*sleep 600"):
        launch("tf_config", BEHAVE, ("orphan",), np=2)


def test_a_rank_that_never_starts(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", BEHAVE, ("well",), np=2, start_order=[1])
    with pytest.raises(LaunchError, match="rank 0 has no result"):
        outcome.results("rank_and_folder")


def test_names_of_checks_are_read_without_running_the_script() -> None:
    assert names_of_checks(BEHAVE) == ["rank_and_folder", "a_set_of_variables", "raises_on_rank_1"]
