"""Elastic jobs between hosts: what a whole host takes with it when it is lost."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness import hosts as machines
from harness import warm
from harness.launchers import BIN
from hosts.jobs import DEADLINE, environment_for

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
SHARED = Path(__file__).parents[1] / "launch" / "workers" / "elastic_shared.py"


@pytest.mark.parametrize("slots", [(2, 2), (1, 2)], ids=["2+2", "1+2"])
def test_parts_of_an_optimizer_outlive_the_loss_of_a_host(slots: tuple[int, int], tmp_path: Path) -> None:
    lost = range(slots[0], sum(slots))
    events = " ".join(f"{worker}:kill:7" for worker in lost)
    with machines.network(2) as network:
        environment = environment_for(network, tmp_path, {"HVKERAS_BACKEND": "native"})
        places = ",".join(f"{host.address}:{count}" for host, count in zip(network.hosts, slots, strict=True))
        done = subprocess.run(
            network.hosts[0].command(
                str(BIN / "hvkeras"), "run", "-H", places, "--min-np", "1",
                *warm.python(environment), str(SHARED), "Adam", "0", events),
            cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=DEADLINE)
    assert done.returncode == 0, done.stdout
    assert f"{sum(slots)} ranks on 2 hosts" in done.stdout
    assert re.search(rf"goes on with {slots[0]} ranks? from commit 2", done.stdout), done.stdout
    assert "goes back to the last commit on disk" not in done.stdout
    assert done.stdout.count("as one process: True") >= slots[0], done.stdout
