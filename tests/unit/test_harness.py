"""The harness itself: it must see failures, hangs and orphans, or no other test means anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness import LaunchError, Outcome, schedule, start_job
from harness.checks import names_of_checks
from harness.processes import run_python

BEHAVE = Path(__file__).parent / "harness_scripts" / "behave.py"



@pytest.fixture(params=[pytest.param("mpirun", marks=pytest.mark.slow), "tf_config"])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[pytest.param(False, id="warm"), pytest.param(True, id="cold", marks=pytest.mark.nightly)])
def cold(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_results_come_back_by_rank_from_outside_the_repository(
    launcher: str, cold: bool, launch_once: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "8")
    outcome = launch_once(launcher, BEHAVE, ("well",), np=2, cold=cold)
    assert outcome.results("rank_and_folder") == [[0, str(outcome.cwd)], [1, str(outcome.cwd)]]
    assert not Path(__file__).is_relative_to(outcome.cwd)
    assert all(len(variables) == 1 for variables in outcome.results("a_set_of_variables"))
    assert outcome.stdout(1).strip() == "rank 1 speaks"


def test_the_failing_rank_is_named_with_its_log(launcher: str, cold: bool, launch: Callable[..., Outcome]) -> None:
    with pytest.raises(LaunchError, match=r"(?s)the first failing rank is 1.*rank 1 was told to raise") as caught:
        launch(launcher, BEHAVE, ("raise",), np=2, cold=cold)
    assert caught.value.outcome is not None
    assert "ValueError: rank 1 was told to raise" in caught.value.outcome.failing_log()
    assert "fork_server" not in caught.value.outcome.failing_log()


def test_an_expected_failure_returns_the_other_results(launcher: str, launch: Callable[..., Outcome]) -> None:
    outcome = launch(launcher, BEHAVE, ("raise",), np=2, expect_failure=True)
    assert outcome.exit_code != 0
    assert outcome.first_failing == 1
    with pytest.raises(LaunchError, match="rank 1 was told to raise"):
        outcome.results("raises_on_rank_1")


def test_a_program_ends_with_its_last_line_whatever_its_libraries_still_want(tmp_path: Path) -> None:
    done = run_python("import atexit, time; atexit.register(time.sleep, 1000); print('said')", cwd=tmp_path,
                      deadline=30)
    assert (done.returncode, done.stdout) == (0, "said\n")


def test_only_checks_whose_results_are_read_run(request: pytest.FixtureRequest) -> None:
    def reads_one() -> str:
        return "a_hash"

    def reads_any() -> str:
        return "a text"

    one, other = (pytest.Function.from_parent(request.node.parent, name=function.__name__, callobj=function)
                  for function in (reads_one, reads_any))
    group = schedule.group_of(one)
    assert schedule.wanted_checks(BEHAVE, group, [one]) == ["a_hash"]
    assert schedule.wanted_checks(BEHAVE, group, [one, other]) is None
    assert schedule.wanted_checks(BEHAVE, "another group", [one]) is None


def test_an_unexpected_success_fails(launch: Callable[..., Outcome]) -> None:
    with pytest.raises(LaunchError, match="should fail"):
        launch("tf_config", BEHAVE, ("well",), np=2, expect_failure=True)


def test_a_job_that_never_ends_shows_its_stacks(launcher: str, cold: bool, tmp_path: Path) -> None:
    with start_job(launcher, BEHAVE, ("sleep",), np=2, folder=tmp_path, cold=cold) as job:
        job.wait_for(0, "rank 0 speaks")
        with pytest.raises(LaunchError, match=r"(?s)never ended before its deadline.*Fatal Python error.*behave.py"):
            job.wait(deadline=1)


def test_a_rank_can_be_killed_from_outside(launcher: str, cold: bool, tmp_path: Path) -> None:
    with start_job(launcher, BEHAVE, ("sleep",), np=2, folder=tmp_path, expect_failure=True, cold=cold) as job:
        job.wait_for(1, "rank 1 speaks")
        job.wait_for(0, "rank 0 speaks")
        for rank in (1, 0):
            if launcher == "tf_config" or rank == 1:
                os.kill(job.pid(rank), signal.SIGKILL)
        outcome = job.wait()
    assert outcome.exit_code != 0


@pytest.mark.parametrize(("how", "found"), [pytest.param("orphan", "sleep 600", marks=pytest.mark.slow),
                                            ("fork", "python")])
def test_an_orphan_is_found_and_killed(how: str, found: str, cold: bool, launch: Callable[..., Outcome]) -> None:
    with pytest.raises(LaunchError, match=rf"left processes behind.*{found}"):
        launch("tf_config", BEHAVE, (how,), np=2, cold=cold)


def test_the_end_of_a_rank_is_that_of_its_process(cold: bool, launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", BEHAVE, ("end",), np=3, cold=cold, expect_failure=True)
    assert outcome.exit_codes == (7, -signal.SIGKILL, 0)


def test_what_a_launcher_kills_is_gone(tmp_path: Path) -> None:
    """The stand-in of a warm rank dies without a word; its rank must not live on."""
    with start_job("tf_config", BEHAVE, ("sleep",), np=1, folder=tmp_path, expect_failure=True) as job:
        job.wait_for(0, "rank 0 speaks")
        rank = psutil.Process(job.pid(0))
        job.launcher().kill()
        rank.wait(timeout=30)
        assert job.wait().exit_codes == (-signal.SIGKILL,)


def test_warm_ranks_share_neither_random_numbers_nor_hashes(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", BEHAVE, ("well",), np=2)
    assert all(one != other for one, other in zip(*outcome.results("random_numbers"), strict=True))
    first, second = outcome.results("a_hash")
    assert first != second


@pytest.mark.slow
def test_a_warm_rank_with_its_own_variables_of_imports_is_a_new_process(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", BEHAVE, ("well",), np=1, rank_env={0: {"TF_USE_LEGACY_KERAS": "1"}})
    assert "another TF_USE_LEGACY_KERAS was set when the modules were imported" in outcome.stderr(0)
    assert outcome.results("keras") == ["2"]
    assert launch("tf_config", BEHAVE, ("well",), np=1, env={"TF_USE_LEGACY_KERAS": "1"}).results("keras") == ["2"]


def test_a_rank_that_never_starts(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", BEHAVE, ("well",), np=2, start_order=[1])
    with pytest.raises(LaunchError, match="rank 0 has no result"):
        outcome.results("rank_and_folder")


def test_names_of_checks_are_read_without_running_the_script() -> None:
    assert names_of_checks(BEHAVE) == ["rank_and_folder", "a_set_of_variables", "random_numbers", "a_hash", "keras",
                                       "raises_on_rank_1"]
