"""Unauthenticated connections to every open port during the start and the run of a job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import hosts as machines
from hosts.jobs import ports_of, running

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]

WORKERS = Path(__file__).parent / "workers"
# Repeatedly connects to ports of an address, sends the first bytes of UCX's TCP protocol and garbage, and reports.
STRANGER = """
import socket, struct, sys, time
address, seconds, ports = sys.argv[1], float(sys.argv[2]), [int(port) for port in sys.argv[3:]]
magic = struct.pack("<Q", 0xCAFEBABE12345678)
end, reached = time.monotonic() + seconds, set()
while time.monotonic() < end:
    for port in ports:
        for text in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", magic + bytes(64), magic + b"\\xff" * 4096):
            try:
                with socket.create_connection((address, port), timeout=0.1) as one:
                    reached.add(port)
                    one.sendall(text)
            except OSError:
                pass
print("reached", *sorted(reached), flush=True)
"""


def test_nobody_else_reaches_the_ports_of_a_running_job(tmp_path):
    with machines.network(3) as network, running(network, (1, 1, 0), tmp_path) as job:
        job.wait_for("step 1\n")
        for host in network.hosts[:2]:
            ports = ports_of(host)
            done = subprocess.run(network.hosts[2].command(sys.executable, "-c", STRANGER, host.address, "3",
                                                           *map(str, ports)), capture_output=True, text=True,
                                  timeout=60)
            # The launcher's port (control channel) answers only authenticated peers.
            reached = {int(port) for port in done.stdout.split()[1:]}
            assert len(reached) <= (1 if host is network.hosts[0] else 0), (ports, reached)
        before = [job.text(rank).count("step") for rank in (0, 1)]
        job.wait_for(f"step {50 * (max(before) + 1)}\n")


def test_a_stranger_at_all_ports_while_ranks_connect_changes_nothing(tmp_path):
    with machines.network(3) as network:
        everything = [str(port) for port in range(32768, 61000, 1)]
        address = network.hosts[1].address
        strangers = [subprocess.Popen(network.hosts[2].command(
            sys.executable, "-c", STRANGER.replace("timeout=0.1", "timeout=0.02"), address, "12",
            *everything[start::16]), stdout=subprocess.PIPE, text=True) for start in range(4)]
        try:
            with running(network, (1, 1, 0), tmp_path, env={"ENDLESS_STEPS": "100"}) as job:
                assert job.finish() == 0, job.output
        finally:
            for stranger in strangers:
                stranger.kill()
                stranger.communicate()


def test_an_address_of_ucx_that_is_replayed_reaches_nobody(tmp_path):
    """Neither from another host nor from a host of the job, with UCX itself: the port is closed by then."""
    with machines.network(3) as network, running(network, (1, 1, 0), tmp_path, WORKERS / "recorded.py") as job:
        job.wait_for("step 1\n")
        address = re.findall(r"^address (\w+)$", job.text(1), re.MULTILINE)[0]
        for host in network.hosts[2], network.hosts[0]:
            done = subprocess.run(host.command(sys.executable, str(WORKERS / "replayed.py"), address,
                                               machines.CABLE), cwd=tmp_path, capture_output=True, text=True,
                                  timeout=60)
            assert re.search("^UCX (failed to connect to|connection to) a rank of the job", done.stdout), done
        before = [job.text(rank).count("step") for rank in (0, 1)]
        job.wait_for(f"step {50 * (max(before) + 1)}\n")
