"""Relays between hosts: ranks of a host share a connection, and what fails is named everywhere."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from harness import hosts as machines
from hosts.jobs import running

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
RELAYS = {"HVKERAS_RELAY_FROM": "2"}


def relays_on(job, host):
    """The relays of a host."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.pids_on(host)}
    return [pid for pid, line in lines.items() if b"hvkeras.control.relay import main" in line]


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
        assert [job.pids_on(host) for host in network.hosts] == [[], []]


def test_a_killed_relay_is_named_by_all(tmp_path):
    with machines.network(2) as network, running(network, (2, 2), tmp_path, env=RELAYS, cold=True) as job:
        job.wait_for("step 1\n")
        [relay] = relays_on(job, network.hosts[1])
        os.kill(relay, signal.SIGKILL)
        assert job.finish() != 0
        for rank, line in last_lines(job, range(4)).items():
            assert re.search(rf"ends because the relay on {network.hosts[1].name} \(pid {relay}\), which connects"
                             r" (ranks 2, 3|the ranks there), ended unexpectedly", line), f"rank {rank}: {line}"
        assert [job.pids_on(host) for host in network.hosts] == [[], []]


def test_sixty_four_ranks_on_eight_hosts(tmp_path):
    with machines.network(8) as network, running(network, (8,) * 8, tmp_path) as job:
        job.wait_for("step 1\n")
        assert [len(relays_on(job, host)) for host in network.hosts] == [1] * 8
        os.kill(job.pid(42), signal.SIGKILL)
        assert job.finish() != 0
        wrong = {rank: line for rank, line in last_lines(job, set(range(64)) - {42}).items()
                 if f"ends because rank 42 on {network.hosts[5].name}" not in line}
        assert not wrong, wrong
        assert [job.pids_on(host) for host in network.hosts] == [[]] * 8
