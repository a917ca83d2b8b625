"""Elastic jobs between hosts: loss of a whole host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import hosts as machines
from harness import warm
from harness.launchers import BIN
from hosts.jobs import DEADLINE, environment_for

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
SHARED = Path(__file__).parents[1] / "launch" / "workers" / "elastic_shared.py"

# The launcher's side of an elastic job, and a worker that waits to join; argument: the first host's address.
LAUNCHER = """
import sys, time
from hvkeras.control.membership_channel import MembershipServer
server = MembershipServer(b"s" * 32, sys.argv[1], lambda _, message: print(type(message).__name__, flush=True), 3.0)
print(server.start()[1], flush=True)
while not server.connected:
    time.sleep(0.01)
while server.connected:
    time.sleep(0.01)
print("lost", flush=True)
server.stop()
"""
WAITING = """
import sys
from hvkeras.control.membership_channel import MembershipClient
from hvkeras.errors import PeerError
try:
    MembershipClient((sys.argv[1], int(sys.argv[2])), b"s" * 32, 0, 3.0).next_generation(-1, 0)
except PeerError as error:
    print(error, flush=True)
"""


def test_launcher_and_waiting_worker_notice_that_the_others_host_is_gone(tmp_path: Path) -> None:
    with machines.network(2) as network:
        first, second = network.hosts

        def start(host: machines.Host, *arguments: str) -> subprocess.Popen[str]:
            return subprocess.Popen(host.command(sys.executable, "-c", *arguments), cwd=tmp_path, text=True,
                                    stdout=subprocess.PIPE)

        with start(first, LAUNCHER, first.address) as launcher:
            assert launcher.stdout is not None
            port = launcher.stdout.readline().strip()
            with start(second, WAITING, first.address, port) as worker:
                try:
                    assert launcher.stdout.readline() == "Ready\n"
                    subprocess.run(second.command("ip", "link", "set", machines.CABLE, "down"), check=True)
                    said, told = worker.communicate(timeout=DEADLINE)[0], launcher.communicate(timeout=DEADLINE)[0]
                finally:
                    worker.kill()
                    launcher.kill()
    assert "The job ended: its launcher is gone" in said
    assert told == "lost\n"


@pytest.mark.parametrize("slots", [(2, 2), (1, 2)], ids=["2+2", "1+2"])
def test_parts_of_an_optimizer_outlive_the_loss_of_a_host(slots: tuple[int, int], tmp_path: Path) -> None:
    lost = range(slots[0], sum(slots))
    events = " ".join(f"{worker}:kill:7" for worker in lost)
    with machines.network(2) as network:
        relays = {"HVKERAS_RELAY_FROM": "4"}  # for the first four ranks, but not for the two that remain
        environment = environment_for(network, tmp_path, {"HVKERAS_BACKEND": "native"} | relays)
        indices = ",".join(f"{host.address}:{count}" for host, count in zip(network.hosts, slots, strict=True))
        done = subprocess.run(
            network.hosts[0].command(
                str(BIN / "hvkeras"), "run", "-H", indices, "--min-np", "1",
                *warm.python(environment), str(SHARED), "Adam", "0", events),
            cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=DEADLINE)
    assert done.returncode == 0, done.stdout
    assert f"{sum(slots)} ranks on 2 hosts" in done.stdout
    assert re.search(rf"resumes with {slots[0]} ranks? from commit 2", done.stdout), done.stdout
    assert "restores the last commit on disk" not in done.stdout
    assert done.stdout.count("as one process: True") >= slots[0], done.stdout
