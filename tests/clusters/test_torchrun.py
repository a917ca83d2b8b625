"""Real torchrun: on one host, on two, with restarts, and when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from harness import hosts as machines
from harness.launchers import BIN, clean_environment
from harness.processes import MARK, below, end_marked

TORCHRUN = BIN / "torchrun"
pytestmark = pytest.mark.skipif(not TORCHRUN.exists(), reason="torch is not installed: make .venv-clusters/.has-torch")

ROOT = Path(__file__).resolve().parents[2]
MEET = ROOT / "tests" / "launch" / "workers" / "meet.py"
RESUMING = ROOT / "examples" / "resuming.py"


def facts(text):
    return sorted((json.loads(found) for found in re.findall(r"FACTS (\{.*?\})", text)), key=lambda fact: fact["rank"])


@pytest.fixture
def start(tmp_path):
    """Starts command lines, in an environment of their own, and ends them with the test."""
    mark, started = f"torchrun-{os.getpid()}-{tmp_path.name}", []

    def begin(command, **environment):
        started.append(subprocess.Popen(
            command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=clean_environment(tmp_path) | {MARK: mark, "HVKERAS_START_TIMEOUT": "120", **environment}))
        return started[-1]

    yield begin
    end_marked(mark)
    for process in started:
        process.communicate(timeout=10)


def test_on_one_host_the_native_engine_serves_its_ranks(start):
    output = start([str(TORCHRUN), "--standalone", "--nproc-per-node", "2", str(MEET)]).communicate(timeout=150)[0]
    found = facts(output)
    assert [(fact["sum"], fact["local"], fact["backend"]) for fact in found] == [
        (3.0, [0, 2], "native"), (3.0, [1, 2], "native")], output
    assert "2 ranks on 1 host, launched by torchrun" in output


@pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
@pytest.mark.parametrize("backend", ["native", "tfdist"])
def test_on_two_hosts_ranks_meet_beside_torchruns_store(start, backend):
    with machines.two_hosts() as hosts:
        command = [str(TORCHRUN), "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "7",
                   "--rdzv-endpoint", f"{hosts[0].address}:29500", str(MEET)]
        started = [start(host.command(*command), HVKERAS_BACKEND=backend,
                         HVKERAS_SECRET="not a secret outside of this test") for host in hosts]
        outputs = [process.communicate(timeout=200)[0] for process in started]
    found = facts("".join(outputs))
    assert [(fact["sum"], fact["cross"], fact["backend"]) for fact in found] == [
        (3.0, [0, 2], backend), (3.0, [1, 2], backend)], outputs
    assert "2 ranks on 2 hosts, launched by torchrun" in "".join(outputs)


def ranks_of(process):
    """The processes that torchrun started."""
    return below(process.pid, str(RESUMING))


def wait_for_epochs(folder, process):
    deadline = time.monotonic() + 150
    while not list((folder / "backup").glob("latest*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)


def test_training_goes_on_after_a_rank_was_killed(start, tmp_path):
    process = start([str(TORCHRUN), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(RESUMING),
                     "--epochs", "12", "--save-freq", "5"], HVKERAS_BACKEND="native")
    wait_for_epochs(tmp_path, process)
    ranks_of(process)[-1].kill()
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    assert re.search(r"because rank \d on \S+ \(pid \d+\) ended unexpectedly", output)
    assert re.search(r"training resumes with epoch \d+.*, from the backup of 2 workers", output)
    assert re.search(r"test accuracy: (0\.9|1\.0)", output)


def test_ranks_end_when_torchrun_is_killed(start, tmp_path):
    process = start([str(TORCHRUN), "--standalone", "--nproc-per-node", "2", str(RESUMING), "--epochs", "500",
                     "--save-freq", "5"], HVKERAS_BACKEND="native")
    wait_for_epochs(tmp_path, process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
