"""Relays between hosts: ranks of a host share a connection, and all ranks report a failure."""

from __future__ import annotations

import contextlib
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
from harness import warm
from harness.launchers import BIN
from harness.processes import command_line
from hosts.jobs import DEADLINE, ENDLESS, environment_for, running

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
BUSY = {"HVKERAS_LIVENESS_TIMEOUT": "10"}  # 64 ranks share two cores
RELAYS = {"HVKERAS_RELAY_FROM": "2"}


def command_line_of(pid):
    with contextlib.suppress(psutil.Error):
        return command_line(psutil.Process(pid))
    return ""


def relays_on(job, host):
    return [pid for pid in job.pids_on(host) if "hvkeras.control.relay import main" in command_line_of(pid)]


def assert_nothing_is_left(job, network):
    """Assert that relays exit after their ranks; the launcher does not wait for them."""
    deadline = time.monotonic() + 5.0
    while (left := [pid for host in network.hosts for pid in job.pids_on(host)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [command_line_of(pid) for pid in left]


def last_lines(job, ranks):
    return {rank: job.last_line(rank) for rank in ranks}


def test_a_killed_rank_is_named_by_all_through_the_relays(tmp_path):
    with machines.network(2) as network, running(network, (2, 2), tmp_path, env=RELAYS, cold=True) as job:
        job.wait_for("step 1\n")
        assert [len(relays_on(job, host)) for host in network.hosts] == [1, 1]
        os.kill(job.pid(3), signal.SIGKILL)
        assert job.finish() != 0
        for rank, line in last_lines(job, (0, 1, 2)).items():
            assert re.search(rf"rank {rank} on {job.host_of(rank).name} ends because rank 3 on"
                             rf" {network.hosts[1].name} .*(SIGKILL|killed|lost|ended)", line), line
        assert_nothing_is_left(job, network)


def test_a_killed_relay_is_named_by_all(tmp_path):
    with machines.network(2) as network, running(network, (2, 2), tmp_path, env=RELAYS, cold=True) as job:
        job.wait_for("step 1\n")
        [relay] = relays_on(job, network.hosts[1])
        os.kill(relay, signal.SIGKILL)
        assert job.finish() != 0
        for rank, line in last_lines(job, range(4)).items():
            assert re.search(rf"ends because the relay on {network.hosts[1].name} \(pid {relay}\), which connects"
                             r" (ranks 2, 3|the ranks there), ended unexpectedly", line), f"rank {rank}: {line}"
        assert_nothing_is_left(job, network)


def test_sixty_four_ranks_on_eight_hosts(tmp_path):
    patient = {"HVKERAS_LIVENESS_TIMEOUT": "10"}  # 64 ranks share two cores
    with machines.network(8) as network, running(network, (8,) * 8, tmp_path, env=patient) as job:
        job.wait_for("step 1\n")
        assert [len(relays_on(job, host)) for host in network.hosts] == [1] * 8
        os.kill(job.pid(42), signal.SIGKILL)
        assert job.finish() != 0
        wrong = {rank: line for rank, line in last_lines(job, set(range(64)) - {42}).items()
                 if f"ends because rank 42 on {network.hosts[5].name}" not in line}
        assert not wrong, wrong
        assert_nothing_is_left(job, network)


@contextlib.contextmanager
def started(commands, folder, environments):
    """Start processes with output to files, and return them with a function that reads the files."""
    files = [(folder / f"output.{number}").open("w+") for number in range(len(commands))]
    processes = [subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=file,
                                  stderr=subprocess.STDOUT, start_new_session=True)
                 for command, environment, file in zip(commands, environments, files, strict=True)]
    try:
        yield processes, lambda: [Path(file.name).read_text(errors="replace") for file in files]
    finally:
        for process, file in zip(processes, files, strict=True):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            file.close()


def tf_config_jobs(network, folder):
    """Return the commands and environments of 64 workers."""
    cluster = {"worker": [f"{host.address}:{2222 + slot}" for host in network.hosts for slot in range(8)]}
    environments = [environment_for(network, folder, {
        **BUSY, "HVKERAS_SECRET": "not a secret outside of this test",
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})})
        for index in range(64)]
    return [host.command(*warm.python(environments[0]), str(ENDLESS)) for host in network.hosts for _ in range(8)
            ], environments


def mpirun_job(network, folder):
    """Return the command and environment of an mpirun with 64 ranks."""
    environment = environment_for(network, folder, BUSY)
    inside = f"{machines.NETWORK}.0/24"
    command = network.hosts[0].command(
        str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "plm_rsh_agent",
        str(folder / "ssh"), "-H", ",".join(f"{host.address}:8" for host in network.hosts),
        "--mca", "btl", "self,tcp", "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", inside,
        "--mca", "oob_tcp_if_include", inside, "-x", "PATH", "-x", "PYTHONPATH", "-x", "HVKERAS_LIVENESS_TIMEOUT",
        *warm.python(environment), str(ENDLESS))
    return [command], [environment]


@pytest.mark.parametrize("jobs", [tf_config_jobs, mpirun_job])
def test_sixty_four_ranks_of_other_launchers(jobs, tmp_path):
    with machines.network(8) as network:
        commands, environments = jobs(network, tmp_path)
        with started(commands, tmp_path, environments) as (processes, outputs):
            end = time.monotonic() + DEADLINE
            # mpirun may print several ranks' output on one line
            while len(re.findall(r"step 1(?!\d)", "".join(outputs()))) < 64:
                assert time.monotonic() < end, "".join(outputs())[-9000:]
                assert all(one.poll() is None for one in processes), "".join(outputs())[-9000:]
                time.sleep(0.1)
            pids = [int(pid) for pid in re.findall(r"pid (\d+)", "".join(outputs()))]
            assert len(pids) == 64
            os.kill(pids[-1], signal.SIGKILL)
            for process in processes:
                process.wait(timeout=DEADLINE)
            text = "".join(outputs())
        [lost] = set(re.findall(r"ends because rank (\d+) on", text)) or {None}
        survivors = set(re.findall(r"rank (\d+) on \S+ ends because rank", text))
        assert len(survivors) >= 62 and lost not in survivors, text[-9000:]
