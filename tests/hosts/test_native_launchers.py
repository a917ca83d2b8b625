"""The native engine between hosts under horovodrun. For other launchers: tests/launch/test_hosts.py, tests/clusters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import hosts as machines
from harness.launchers import BIN
from hosts.jobs import DEADLINE, environment_for

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
MEET = Path(__file__).parents[1] / "launch" / "workers" / "meet.py"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovodrun_starts_native_ranks_on_two_hosts(controller, tmp_path):
    with machines.network(2) as network:
        indices = ",".join(f"{host.name}:2" for host in network.hosts)
        more = []
        if controller == "mpi":
            more = ["--mpi-args", f"--mca oob_tcp_if_include {machines.NETWORK}.0/24"]
        done = subprocess.run(
            network.hosts[0].command(
                str(BIN / "horovodrun"), f"--{controller}", "-np", "4", "-H", indices, "--network-interfaces",
                machines.CABLE, *more, sys.executable, str(MEET)),
            cwd=tmp_path, env=environment_for(network, tmp_path, {"HVKERAS_BACKEND": "native"}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout
    found = [json.loads(fact) for fact in re.findall(r"FACTS (\{.*?\})", done.stdout)]
    assert sorted((fact["rank"], fact["backend"], fact["sum"]) for fact in found) == [
        (rank, "native", 10.0) for rank in range(4)], done.stdout
    assert re.search(r"backend native \(shared memory \(\w+\) and UCX [\d.]+ on cable\)", done.stdout), done.stdout
    assert "4 ranks on 2 hosts" in done.stdout
