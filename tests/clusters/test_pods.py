"""Pods of a Kubernetes Indexed Job: killed, and started again as the kubelet does."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from harness import hosts as machines
from harness.launchers import BIN
from harness.pods import JOB, pods

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())

SURVIVES = Path(__file__).resolve().parents[1] / "launch" / "workers" / "survives.py"
RESUMING = str(Path(__file__).resolve().parents[2] / "examples" / "resuming.py")


def start_both(job, folder, **extra):
    command = [sys.executable, RESUMING, "--epochs", "8", "--save-freq", "5", "--backup-dir", str(folder / "backup")]
    return [job.start(index, command, folder, HVKERAS_START_TIMEOUT="120", **extra) for index in (0, 1)]


def wait_for_a_backup(folder, started):
    deadline = time.monotonic() + 150
    while not list((folder / "backup").glob("latest*")):
        assert time.monotonic() < deadline and all(pod.poll() is None for pod in started), started[0].communicate()[0]
        time.sleep(0.2)


def rank_in(pod):
    """The rank's process, below the shell that stands for the container."""
    processes = [psutil.Process(pod.pid), *psutil.Process(pod.pid).children(recursive=True)]
    return next(one for one in processes if RESUMING in one.cmdline())


def test_a_killed_pod_ends_all_and_training_goes_on_when_they_are_started_again(tmp_path):
    with pods() as job:
        job.resolve()
        first = start_both(job, tmp_path)
        wait_for_a_backup(tmp_path, first)
        rank_in(first[1]).kill()
        output = first[0].communicate(timeout=60)[0]
        first[1].communicate(timeout=10)
        assert all(pod.returncode for pod in first)
        assert re.search(rf"rank 0 on {JOB}-0 ends because rank 1 on {JOB}-1 \(pid \d+\) ended unexpectedly", output)
        again = start_both(job, tmp_path)
        output = again[0].communicate(timeout=150)[0]
        assert again[1].wait(timeout=30) == again[0].returncode == 0, output
    assert re.search(r"training resumes with epoch \d", output)
    assert re.search(r"test accuracy: (0\.9|1\.0)", output)


def test_a_deleted_job_gets_sigterm_says_so_and_ends(tmp_path):
    with pods() as job:
        job.resolve()
        started = start_both(job, tmp_path)
        wait_for_a_backup(tmp_path, started)
        for pod in started:
            rank_in(pod).send_signal(signal.SIGTERM)
        outputs = [pod.communicate(timeout=60)[0] for pod in started]
    assert all(pod.returncode for pod in started)
    assert any("received SIGTERM" in output.splitlines()[-1] for output in outputs), outputs


def test_an_elastic_job_goes_on_while_pods_come_and_go(tmp_path):
    command = [str(BIN / "hvkeras"), "run", "--min-np", "1", sys.executable, str(SURVIVES), "soak", ""]
    settings = {"HVKERAS_START_TIMEOUT": "60", "HVKERAS_LIVENESS_TIMEOUT": "3", "HVKERAS_BACKEND": "native"}

    def wait_for(text, count=1):
        deadline = time.monotonic() + 90
        while sum(text in line for line in lines) < count:
            assert time.monotonic() < deadline and first.poll() is None, "".join(lines)
            time.sleep(0.1)

    with pods(3) as job:
        job.resolve()
        first, *others = [job.start(index, command, tmp_path, **settings) for index in range(3)]
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(first.stdout))
        reader.start()
        try:
            wait_for("3 ranks on 3 hosts")
            wait_for("first step")
            job.kill(2, others[1])
            wait_for("resumes with 2 ranks")
            others[1] = job.start(2, command, tmp_path, **settings)
            wait_for("resumes with 3 ranks")
            others[0].send_signal(signal.SIGTERM)  # its node is drained
            assert others[0].wait(timeout=30) == 143
            wait_for("resumes with 2 ranks", 2)
            others[0] = job.start(1, command, tmp_path, **settings)
            wait_for("resumes with 3 ranks", 2)
            (tmp_path / "finish").touch()
            assert [pod.wait(timeout=60) for pod in (first, *others)] == [0, 0, 0], "".join(lines)
        finally:
            job.end()
            reader.join()
    assert sum("every sample once in each" in line for line in lines) == 3, "".join(lines)
    assert "restarts all ranks" not in "".join(lines)
