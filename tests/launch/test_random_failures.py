"""A rank that is killed, is stopped or exits at a random moment during collectives of the native engine."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from harness import start_job

WORKER = Path(__file__).parent / "workers" / "busy.py"
ENV = {"HVKERAS_LIVENESS_TIMEOUT": "5"}
WORDS = {
    "kill": r"ended unexpectedly \(killed, crashed, or out of memory\)",
    "stop": r"gave no sign of life for 5 s \(stopped, frozen or cut off\)",
    "exit": r"exited with code 7",
}


@pytest.mark.parametrize(("how", "np", "cold"), [pytest.param("kill", 2, True, marks=pytest.mark.nightly),
                                                 ("kill", 4, False),
                                                 pytest.param("stop", 3, False, marks=pytest.mark.nightly),
                                                 pytest.param("exit", 2, True, marks=pytest.mark.slow)])
def test_the_survivors_name_a_rank_that_fails_amid_collectives(tmp_path, how, np, cold):
    victim = 1 if how == "exit" else random.randrange(1, np)
    delay = random.uniform(0.05, 0.8)
    told = f"rank {victim} of {np}, after {delay:.3f} s"
    arguments = (str(delay) if how == "exit" else "0",)
    with start_job("tf_config", WORKER, arguments, np=np, folder=tmp_path, backend="native", env=ENV,
                   expect_failure=True, deadline=120.0, cold=cold) as job:
        for rank in range(np):
            job.wait_for(rank, "busy")
        if how != "exit":
            pid = job.pid(victim)
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "stop":
            job._processes[0].wait(timeout=60)
            os.kill(pid, signal.SIGKILL)  # the test must: the rank is stopped, and has no launcher
        outcome = job.wait()
    for rank in set(range(np)) - {victim}:
        line = [line for line in outcome.stderr(rank).splitlines() if line.strip()][-1]
        words = rf"hvkeras: rank {rank} on \S+ ends because rank {victim} on \S+ \(pid \d+\) {WORDS[how]}"
        assert re.fullmatch(words, line), f"{told}: {line}"
        assert outcome.exit_codes[rank] == 1, told


@pytest.mark.slow
def test_killing_all_ranks_simultaneously_leaves_no_shared_memory(tmp_path):
    with start_job("tf_config", WORKER, ("0",), np=3, folder=tmp_path, backend="native", env=ENV, expect_failure=True,
                   deadline=120.0, cold=True) as job:
        for rank in range(3):
            job.wait_for(rank, "busy")
        pids = [job.pid(rank) for rank in range(3)]
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        time.sleep(random.uniform(0.0, 0.5))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        outcome = job.wait()
    assert set(outcome.exit_codes) == {-signal.SIGKILL}
    names = set(re.findall(r"/dev/shm/(hvkeras-[0-9a-f]{16})", maps))  # other tests' jobs have theirs there meanwhile
    assert names
    assert not [left for left in os.listdir("/dev/shm") if left.startswith(tuple(names))]
