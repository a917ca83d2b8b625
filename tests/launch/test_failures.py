"""A rank that is killed, stopped, sleeps, raises or exits ends the job, in the same way on every backend."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from harness import ENGINES, some_cold, start_job

WORKER = Path(__file__).parent / "workers" / "misbehave.py"
QUICK = {"HVKERAS_LIVENESS_TIMEOUT": "5", "HVKERAS_STALL_WARNING": "1", "HVKERAS_STALL_SHUTDOWN": "3",
         "HVKERAS_MISMATCH_AFTER": "1", "HVKERAS_EXIT_GRACE": "1"}

# Rank 0's last line about rank 1.
WORDS = {
    "raise": r"failed with ValueError: the sky is falling",
    "exit": r"exited with code 7",
    "leave": r"left the job normally while rank 0 (still needed it|is still waiting for it in .*loop.*)",
    "kill": r"ended unexpectedly \(killed, crashed, or out of memory\)",
    "stop": r"gave no sign of life for 5 s \(stopped, frozen or cut off\)",
    "sleep": r"has not entered .*loop.* \(\S*misbehave.py:\d+ in step\), in which rank 0 has waited \d+ s for it"
             r" \(HVKERAS_STALL_SHUTDOWN .*\); last seen: outside of fit, at \S*misbehave.py:\d+ in misbehave",
}


def last_line(text):
    return [line for line in text.splitlines() if line.strip() and not line.startswith("HINT: ")][-1]


def misbehaving(launcher, how, folder, np=2, backend="tfdist", cold=False):
    """Run a job whose rank 1 misbehaves, and return its outcome after the end of rank 0."""
    # the missing heartbeats are detected first
    env = QUICK | ({"HVKERAS_STALL_SHUTDOWN": "30"} if how == "stop" else {})
    with start_job(launcher, WORKER, (how,), np=np, folder=folder, backend=backend, env=env, expect_failure=True,
                   deadline=90.0, cold=cold) as job:
        job.wait_for(1, "step 5")
        if how == "stop" and launcher == "tf_config":
            pid = job.pid(1)
            job._processes[0].wait(timeout=60)
            os.kill(pid, signal.SIGKILL)  # the test must: the rank is stopped, and has no launcher
        return job.wait()


DETECTED_ALIKE = ("stop", "sleep")  # in the same way on every engine, so `make test` uses one


@pytest.mark.parametrize(("backend", "how", "cold"), [
    pytest.param(*case.values, marks=pytest.mark.slow)
    if case.values[1] in DETECTED_ALIKE and case.values[0] != "native" else case
    for case in some_cold([(backend, how) for backend in ENGINES for how in WORDS
                           if backend != "horovod" or how not in ("exit", "leave")])])
def test_the_survivors_last_line_names_rank_host_and_reason(tmp_path, backend, how, cold):
    outcome = misbehaving("tf_config", how, tmp_path, backend=backend, cold=cold)
    line = last_line(outcome.stderr(0))
    assert re.fullmatch(rf"hvkeras: rank 0 on \S+ ends because rank 1 on \S+ \(pid \d+\) {WORDS[how]}", line)
    assert outcome.exit_codes[0] == 1
    if how == "raise":  # the failed rank prints its traceback, which the survivor's messages do not hide
        assert 'raise ValueError("the sky is falling")' in outcome.stderr(1)
        assert re.search(r"^hvkeras: rank 1 on \S+ \(pid \d+\) failed; the job ends on all ranks\nTraceback",
                         outcome.stderr(1), re.MULTILINE)
        assert re.fullmatch("ValueError: the sky is falling", last_line(outcome.stderr(1)))
        assert "Traceback" not in outcome.stderr(0)
    if how == "sleep":  # the late rank reports its location
        assert re.search(r"rank 1 on \S+ \(pid \d+\) has made no progress for \d+ s: outside of fit, at"
                         r" \S*misbehave.py:\d+ in misbehave; the innermost call last:\n(  .*\n)*"
                         r"  \S*misbehave.py:\d+ in \w+: time.sleep\(", outcome.stderr(1))


@pytest.mark.parametrize(("launcher", "backend", "how", "cold"), [
    pytest.param("mpirun", "horovod", "kill", True, marks=pytest.mark.slow),
    pytest.param("mpirun", "native", "stop", False, marks=pytest.mark.slow),
    pytest.param("horovodrun_gloo", "tfdist", "raise", False, marks=pytest.mark.slow),
])
def test_a_failed_rank_ends_the_job_under_launchers_of_others(tmp_path, launcher, backend, how, cold):
    outcome = misbehaving(launcher, how, tmp_path, backend=backend, cold=cold)
    assert re.search(rf"hvkeras: rank 0 on \S+ ends because rank 1 on \S+ \(pid \d+\) {WORDS[how]}",
                     outcome.stderr(0))
    assert outcome.exit_code and not outcome.orphans


@pytest.mark.parametrize("backend", [pytest.param("tfdist", marks=pytest.mark.slow), "native"])
def test_every_survivor_of_four_names_the_failed_rank(tmp_path, backend):
    outcome = misbehaving("mpirun", "raise", tmp_path, np=4, backend=backend)
    for rank in (0, 2, 3):
        assert re.search(rf"hvkeras: rank {rank} on \S+ ends because rank 1 on \S+ \(pid \d+\) {WORDS['raise']}",
                         last_line(outcome.stderr(rank)))
    assert "ValueError: the sky is falling" in outcome.stderr(1)


@pytest.mark.slow
def test_the_exit_code_of_the_failed_rank_is_kept(tmp_path):
    outcome = misbehaving("mpirun", "exit", tmp_path, cold=True)
    assert outcome.exit_code == 7


@pytest.mark.parametrize(("launcher", "backend"), [
    pytest.param("hvkeras_run", "native", marks=pytest.mark.nightly),
    pytest.param("tf_config", "tfdist", marks=pytest.mark.slow)])
def test_ranks_that_all_stand_still_say_where_and_end_the_job(launcher, backend, launch):
    outcome = launch(launcher, WORKER.with_name("stuck.py"), np=2, backend=backend, expect_failure=True, deadline=120,
                     env=QUICK | {"HVKERAS_STALL_SHUTDOWN": "12"})  # longer than a step on a busy machine
    told = []
    for rank in (0, 1):
        said = outcome.stderr(rank)
        for where in (r"callback Pauses.on_epoch_end, train step 5 of epoch 1, at \S*stuck.py:\d+ in on_epoch_end",
                      r"input, the batch of validation step 2 of epoch 2, at \S*stuck.py:\d+ in load_validation"):
            assert re.search(rf"rank {rank} on \S+ \(pid \d+\) has made no progress for \d+ s: {where}; the innermost",
                             said)
        assert len(re.findall(rf"rank {rank} on \S+ is making progress again, after \d+ s", said)) >= 2
        told.append(re.search(r"rank (\d) on \S+ \(pid \d+\) has made no progress for \d+ s: input, the batch of train"
                              r" step 4 of epoch 3, at \S*stuck.py:\d+ in load; rank (\d) has made no progress either"
                              r" \(HVKERAS_STALL_SHUTDOWN",
                              last_line(said)))
    assert {told[0].groups(), told[1].groups()} < {("0", "1"), ("1", "0")}
    assert outcome.exit_code == 1


@pytest.mark.parametrize("legacy", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_a_rank_that_waits_in_a_call_for_all_learns_how_one_makes_it_alone(legacy, launch):
    outcome = launch("tf_config", WORKER.with_name("late_for_all.py"), np=2, backend="native", deadline=120,
                     env={"HVKERAS_STALL_WARNING": "1", "TF_USE_LEGACY_KERAS": legacy})
    calls = re.findall(r'rank 0 has waited \d+ s in [a-z]+ "([a-z ]+) \(length\)" \(\S*late_for_all.py:\d+ in (\w+)\)'
                       r" for rank 1, which has not entered it; the job ends after \d+ s\. HINT:"
                       r" (.*)\n", outcome.stderr(0))
    alone = "; put what only one rank does into `with hvd.alone():`"
    assert list(dict.fromkeys(calls)) == [
        ("the weights of evaluate", "main", f"all ranks must call evaluate{alone}"),
        ("the start of fit", "main", f"all ranks must call fit{alone}"),
        ("the metrics of evaluate", "on_epoch_end", f"all ranks must call evaluate{alone}"),
        ("the weights of predict", "main", "all ranks must call hvd.predict; one rank by itself calls model.predict")]


@pytest.mark.parametrize("backend", ENGINES)
def test_a_mismatch_is_an_error_on_every_rank_that_names_the_tensor(tmp_path, backend):
    outcome = misbehaving("tf_config", "differ", tmp_path, backend=backend)
    said = [outcome.stderr(rank) for rank in (0, 1)]
    for text in said:
        report = text.rpartition("hvkeras: rank ")[2]
        assert "in the same way as rank" in report or (
            "float32[100] on rank 0" in report and "float32[7] on rank 1" in report), report
    assert any(text.splitlines()[-1].startswith("HINT: make the same calls in the same order") for text in said)


def test_another_collective_on_one_rank_is_an_error_that_names_both(tmp_path):
    outcome = misbehaving("tf_config", "other", tmp_path)
    for rank in (0, 1):
        said = outcome.stderr(rank).rpartition("hvkeras: rank ")[2]
        assert "in the same way" in said or ("allreduce" in said and "broadcast" in said and "another" in said)


@pytest.mark.parametrize(("backend", "number", "cold"), [
    pytest.param("native", signal.SIGTERM, True, marks=pytest.mark.slow),
    pytest.param("tfdist", signal.SIGTERM, False, marks=pytest.mark.slow), ("tfdist", signal.SIGINT, False),
    ("horovod", signal.SIGTERM, False)])
def test_a_signal_ends_a_rank_that_waits_inside_the_engine(tmp_path, backend, number, cold):
    with start_job("tf_config", WORKER, ("wait",), np=2, folder=tmp_path, backend=backend, expect_failure=True,
                   deadline=60.0, env=QUICK | {"HVKERAS_STALL_SHUTDOWN": "60"}, cold=cold) as job:
        job.wait_for(0, "rank 0 has waited", stream="stderr")
        os.kill(job.pid(0), number)
        outcome = job.wait(deadline=20.0)
    words = "received SIGTERM" if number == signal.SIGTERM else r"was interrupted \(Ctrl-C\)"
    assert re.search(rf"rank 0 on \S+ \(pid \d+\) {words}", last_line(outcome.stderr(0)))
    assert re.search(rf"rank 1 on \S+ ends because rank 0 on \S+ \(pid \d+\) {words}", last_line(outcome.stderr(1)))
    assert outcome.exit_codes[0] == (143 if number == signal.SIGTERM else 130)


OUTLIVE = Path(__file__).parent / "workers" / "outlive.py"


@pytest.mark.parametrize(("launcher", "backend", "how", "culprit", "thread"), [
    ("hvkeras_run", "native", "thread", 1, "uploader"),
    pytest.param("tf_config", "tfdist", "thread", 0, "uploader", marks=pytest.mark.nightly),
    pytest.param("mpirun", "native", "thread", 1, "uploader", marks=pytest.mark.nightly),
    pytest.param("tf_config", "tfdist", "atexit", 1, "MainThread", marks=pytest.mark.nightly),
    pytest.param("horovodrun_gloo", "horovod", "engine", 1, "MainThread", marks=pytest.mark.nightly),
])
def test_a_rank_that_outlives_its_script_is_named_with_its_threads_and_ends_the_job(
        tmp_path, launcher, backend, how, culprit, thread):
    with start_job(launcher, OUTLIVE, (how, str(culprit)), np=2, folder=tmp_path, backend=backend, expect_failure=True,
                   deadline=90.0, env=QUICK) as job:
        outcome = job.wait()
    said = outcome.stderr(culprit)
    index = rf"thread {thread} at \S*outlive.py:\d+ in linger"
    name = rf"rank {culprit} on \S+ \(pid \d+\) has not ended, \d+ s after its script did: {index}"
    assert re.search(rf"{name}; the innermost call last:\n  thread .*\n(.*\n)?.*outlive.py:\d+ in linger: time.sleep",
                     said)
    assert re.search(rf"{name} \(HVKERAS_STALL_SHUTDOWN sets the limit\); the job ends", last_line(said))
    if launcher == "mpirun":  # its first rank is the server, and waits for the other
        assert re.search(rf"rank 0 on \S+ ends because {name}", last_line(outcome.stderr(0)))


FORKS = Path(__file__).parent / "workers" / "forks.py"


@pytest.mark.parametrize(("launcher", "backend"), [
    pytest.param("tf_config", "native", marks=pytest.mark.slow),  # rank 0 is the server of the control channel
    *(pytest.param("hvkeras_run", backend, marks=pytest.mark.nightly) for backend in ENGINES),
    pytest.param("mpirun", "horovod", marks=pytest.mark.nightly),
])
def test_processes_that_a_rank_forks_end_by_themselves_and_leave_its_job_alone(tmp_path, launcher, backend):
    env = {"HVKERAS_TIMELINE": str(tmp_path / "timeline-{rank}.json"), "HVKERAS_RECORD": str(tmp_path / "record")}
    with start_job(launcher, FORKS, np=2, folder=tmp_path, backend=backend, cold=True, deadline=120.0, env=env) as job:
        outcome = job.wait()
    for rank in range(2):
        said = outcome.stdout(rank)
        ends = {"end": 0, "exit": 30 + rank, "raise": 1, "collective": 0, "operation": 0, "init": 0, "shutdown": 0,
                "again": 0}
        assert f"ends {ends} after [2.]" in said
        assert "collective Collectives must be called in a rank's own process, not in one that it has forked" in said
        assert backend != "native" or "operation {{function_node" in said
        assert "again Only the process of a rank can join a job, not one forked from it" in said
        assert "again [2.]" in said
        assert outcome.stderr(rank).count("ValueError: only in a child") == 1
        assert "ends because" not in outcome.stderr(rank)
        json.loads((tmp_path / f"timeline-{rank}.json").read_text())


@pytest.mark.nightly  # cold: after the end of Python's threads, the process itself must exit
@pytest.mark.parametrize(("launcher", "culprit"), [("hvkeras_run", 1), ("tf_config", 1), ("tf_config", 0)])
def test_a_finalizer_that_waits_ends_the_job_too(tmp_path, launcher, culprit):
    with start_job(launcher, OUTLIVE, ("del", str(culprit)), np=2, folder=tmp_path, backend="native", cold=True,
                   expect_failure=True, deadline=120.0, env=QUICK) as job:
        outcome = job.wait()
    assert re.search(r"Timeout \(0:00:01\)!\n(.*\n)+.*outlive.py\", line \d+ in linger", outcome.stderr(culprit))
    if culprit == 1:
        told = outcome.stderr(0) + outcome.output
        assert re.search(r"rank 1 on \S+ \(pid \d+\) has left the job, but its process has not ended, \d+ s", told)


@pytest.mark.nightly  # it runs for longer than the timeout for processes after their scripts
def test_a_rank_that_works_by_itself_is_no_rank_that_does_not_end(tmp_path):
    with start_job("mpirun", OUTLIVE, ("work", "1"), np=2, folder=tmp_path, backend="native", deadline=90.0,
                   env=QUICK) as job:
        outcome = job.wait()
    assert outcome.stdout(1) == "worked\n"
    assert "has not ended" not in outcome.stderr(0) + outcome.stderr(1)


@pytest.mark.nightly  # cold ranks, and several seconds of imports
def test_ranks_of_an_mpirun_that_is_killed_end(tmp_path):
    with start_job("mpirun", WORKER, ("wait",), np=2, folder=tmp_path, backend="native", expect_failure=True,
                   env=QUICK | {"HVKERAS_STALL_SHUTDOWN": "60"}, deadline=90.0, cold=True) as job:
        job.wait_for(1, "step 5")
        ranks = [psutil.Process(job.pid(rank)) for rank in (0, 1)]
        job._processes[0].kill()
        _, left = psutil.wait_procs(ranks, timeout=30)
        assert left == []  # mpirun had their output, which is lost
        job.wait()


@pytest.mark.parametrize("launcher", ["hvkeras_run", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_settings_of_rank_0_count_whoever_serves_the_control_channel(tmp_path, launcher):
    with start_job(launcher, WORKER.with_name("own_settings.py"), np=2, folder=tmp_path, backend="native",
                   expect_failure=True, deadline=60.0) as job:
        outcome = job.wait()
    assert "HVKERAS_STALL_SHUTDOWN is 3 on rank 0, 40 on rank 1; all ranks use the value of rank 0" in outcome.stderr(0)
    assert re.search(r"rank 1 on \S+ \(pid \d+\) has not entered an unnamed allreduce .*, in which rank 0 has waited"
                     r" \d+ s for it \(HVKERAS_STALL_SHUTDOWN", last_line(outcome.stderr(0)))
