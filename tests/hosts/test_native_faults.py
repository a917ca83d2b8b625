"""Faults between hosts: each survivor reports the rank, its host and the reason; a slow network is no failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess

import pytest

from harness import hosts as machines
from hosts.jobs import running
from hosts.slow_line import ADDRESSES, DEVICE, slow_line

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
HOSTS = 3


@pytest.fixture
def network():
    with machines.network(HOSTS) as made:
        yield made


def on(host, *command):
    subprocess.run(["ip", "netns", "exec", host.namespace, *command], check=True, capture_output=True, timeout=10)


def test_a_killed_rank_is_named_by_all_survivors(network, tmp_path):
    with running(network, (1, 2, 1), tmp_path, cold=True) as job:
        job.wait_for("step 1\n")
        os.kill(job.pid(2), signal.SIGKILL)
        assert job.finish() != 0
        for rank in (0, 1, 3):
            assert re.search(rf"rank {rank} on {job.host_of(rank).name} ends because rank 2 on"
                             rf" {network.hosts[1].name} .*(SIGKILL|killed|lost|ended)", job.last_line(rank)), \
                job.text(rank, "stderr")


def test_a_host_that_stops_is_named(network, tmp_path):
    with running(network, (1, 1, 1), tmp_path, cold=True) as job:
        job.wait_for("step 1\n")
        stopped = job.pids_on(network.hosts[2])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert job.finish() != 0
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):  # the launcher has already killed it
                    os.kill(pid, signal.SIGKILL)
        for rank in (0, 1):
            assert re.search(rf"rank {rank} on {job.host_of(rank).name} ends because rank 2", job.last_line(rank)), \
                job.text(rank, "stderr")


def test_a_cable_that_is_cut_ends_the_job_on_both_sides(network, tmp_path):
    with running(network, (1, 1, 1), tmp_path, cold=True) as job:
        job.wait_for("step 1\n")
        on(network.hosts[1], "ip", "link", "set", machines.CABLE, "down")
        assert job.finish() != 0
        for rank in (0, 2):
            assert re.search(rf"rank {rank} on {job.host_of(rank).name} ends because rank 1", job.last_line(rank)), \
                job.text(rank, "stderr")
    assert job.pids_on(network.hosts[1]) == []


def test_unlike_sizes_of_packets_do_no_harm(network, tmp_path):
    on(network.hosts[1], "ip", "link", "set", machines.CABLE, "mtu", "1280")
    with running(network, (1, 1, 1), tmp_path, env={"ENDLESS_STEPS": "30"}) as job:
        assert job.finish() == 0, job.output


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft (Debian: apt-get install nftables)")
def test_lost_packets_make_it_slower_and_not_wrong(network, tmp_path):
    on(network.hosts[1], "nft", "add table inet lossy; add chain inet lossy in { type filter hook input priority 0; };"
       " add rule inet lossy in iifname cable numgen random mod 100 < 1 drop")
    with running(network, (1, 1, 1), tmp_path, env={"ENDLESS_STEPS": "30"}) as job:
        assert job.finish() == 0, job.output


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft (Debian: apt-get install nftables)")
def test_a_firewall_between_hosts_is_an_error_that_names_the_host(network, tmp_path):
    # Ranks 1 and 2 connect to the control channel; packets between their hosts are dropped.
    on(network.hosts[1], "nft", f"add table inet wall; add chain inet wall in {{ type filter hook input priority 0; }};"
       f" add rule inet wall in ip saddr {network.hosts[2].address} drop")
    with running(network, (1, 1, 1), tmp_path, env={"HVKERAS_START_TIMEOUT": "8"}) as job:
        assert job.finish() != 0
        said = "\n".join(job.text(rank, "stderr") for rank in range(HOSTS))
        assert re.search("The native engine must reach the other hosts: UCX (failed to connect|connection) to rank [12]"
                         rf" on ({network.hosts[1].name}|{network.hosts[2].name})", said), said
        assert "let a firewall pass TCP between the job's hosts" in said


@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
def test_delayed_and_reordered_packets_make_it_slower_and_not_wrong(network, tmp_path):
    pair = network.hosts[:2]
    with slow_line(pair, delay=0.02, overtaken=0.05):
        indices = [dataclasses.replace(host, address=address) for host, address in zip(pair, ADDRESSES, strict=True)]
        line = dataclasses.replace(network, hosts=tuple(indices))
        with running(line, (1, 1), tmp_path, env={"ENDLESS_STEPS": "10", "HVKERAS_NETWORK_INTERFACES": DEVICE,
                                                 "HVKERAS_LIVENESS_TIMEOUT": "15"}) as job:
            assert job.finish() == 0, job.output
            assert f"on {DEVICE})" in job.text(0, "stderr")
