"""The contract of backends with the native engine between two and three hosts, also with unequal numbers of ranks."""

from __future__ import annotations

import re
import subprocess

import pytest

from harness import hosts as machines
from harness.launchers import BIN
from hosts.jobs import environment_for

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]


@pytest.mark.parametrize("slots", [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2), (2, 1)], ids=str)
def test_the_native_engine_keeps_the_contract_between_hosts(slots, tmp_path):
    with machines.network(len(slots)) as network:
        indices = ",".join(f"{host.address}:{count}" for host, count in zip(network.hosts, slots, strict=True))
        done = subprocess.run(
            network.hosts[0].command(
                str(BIN / "pytest"), "-v", "-p", "no:cacheprovider", "--pyargs", "hvkeras.backends.contract",
                "--backend", "native", "--ranks", str(sum(slots)), "--hosts", indices,
                f"--basetemp={tmp_path / 'base'}"),
            cwd=tmp_path, env=environment_for(network, tmp_path, {"PYTEST_ADDOPTS": "",
                                                                 "HVKERAS_LIVENESS_TIMEOUT": "30"}),
            capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"::(\S+?)(?:\[(\S+ ranks)\S*)? PASSED", done.stdout))
    assert ("test_abort_eagerly", f"{sum(slots)} ranks") in passed
    assert len(re.findall("PASSED", done.stdout)) >= 18
