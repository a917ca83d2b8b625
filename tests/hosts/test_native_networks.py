"""Networks of real hosts: several interfaces, unconnected interfaces, only IPv6, a host that is late or missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from harness import hosts as machines
from harness.launchers import clean_environment
from hosts.jobs import DEADLINE, ENDLESS, running

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())]
STEPS = {"ENDLESS_STEPS": "30"}
WORKERS = Path(__file__).parent / "workers"
SECOND = "second"  # the device of a second cable


@pytest.fixture
def network():
    with machines.network(2) as made:
        yield made


def ip(host, *command):
    subprocess.run(["ip", "-n", host.namespace, *command], check=True, capture_output=True, timeout=10)


def second_cable(network):
    """Connect the hosts directly by another link."""
    one, other = network.hosts
    ip(one, "link", "add", SECOND, "type", "veth", "peer", "name", SECOND, "netns", other.namespace)
    for index, host in enumerate(network.hosts):
        ip(host, "addr", "add", f"10.198.7.{index + 1}/24", "dev", SECOND)
        ip(host, "link", "set", SECOND, "up")


def sent(host, device):
    """Return the bytes that a host has sent through a device."""
    done = subprocess.run(["ip", "-n", host.namespace, "-j", "-s", "link", "show", device], check=True,
                          capture_output=True, text=True, timeout=10)
    return json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"]


def test_a_bridge_that_leads_nowhere_is_not_taken(network, tmp_path):
    for host in network.hosts:  # the same address on each host, as with Docker's bridge
        ip(host, "link", "add", "docker0", "type", "bridge")
        ip(host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip(host, "link", "set", "docker0", "up")
    with running(network, (1, 1), tmp_path, env=STEPS) as job:
        assert job.finish() == 0, job.output
        assert f"on {machines.CABLE})" in job.text(0, "stderr")


def test_as_many_addresses_as_hundreds_of_hosts_have(network, tmp_path):
    """UCX's port accepts them all, even with the small limit of older kernels."""
    for index, host in enumerate(network.hosts):
        added = "".join(f"addr add 10.{100 + index}.{i % 251}.{i // 251 * 16}/32 dev {machines.CABLE}\n"
                        for i in range(1200))
        subprocess.run(["ip", "-n", host.namespace, "-batch", "-"], input=added, check=True, capture_output=True,
                       text=True, timeout=60)
        subprocess.run(["ip", "netns", "exec", host.namespace, "sysctl", "-w", "net.core.optmem_max=20480"],
                       capture_output=True, timeout=10, check=False)  # not all kernels have it per namespace
    with running(network, (1, 1), tmp_path, env=STEPS) as job:
        assert job.finish() == 0, job.output


@pytest.mark.parametrize("devices", [[SECOND], [machines.CABLE, SECOND]], ids=",".join)
def test_cards_that_are_named_are_used_and_no_others(network, devices, tmp_path):
    second_cable(network)
    before = {device: sent(network.hosts[1], device) for device in (machines.CABLE, SECOND)}
    env = STEPS | {"HVKERAS_NETWORK_INTERFACES": ",".join(devices)}
    with running(network, (1, 1), tmp_path, env=env) as job:
        assert job.finish() == 0, job.output
        assert f"on {', '.join(devices)})" in job.text(0, "stderr")
    # Each host sends half of 2 MB in each of 30 steps, twice.
    for device, bytes_before in before.items():
        assert (sent(network.hosts[1], device) - bytes_before > 10_000_000) == (device in devices)


def finished(workers):
    try:
        outputs = [worker.communicate(timeout=DEADLINE)[0] for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.communicate()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    return outputs


def started(network: machines.VirtualNetwork, addresses: list[str], rank: int, folder: Path,
            **env: str) -> subprocess.Popen[str]:
    """Start a rank with TF_CONFIG, without a launcher."""
    cluster = {"worker": [f"{address}:2222" for address in addresses]}
    environment = clean_environment(folder) | STEPS | {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
        "HVKERAS_SECRET": "not a secret outside of this test", **env}
    return subprocess.Popen(network.hosts[rank].command(sys.executable, str(ENDLESS)), env=environment, cwd=folder,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def test_a_late_host_is_waited_for(network, tmp_path):
    addresses = [host.address for host in network.hosts]
    early = started(network, addresses, 0, tmp_path)
    time.sleep(6)
    finished([early, started(network, addresses, 1, tmp_path)])


def test_a_host_that_never_comes_is_named(network, tmp_path):
    addresses = [host.address for host in network.hosts]
    early = started(network, addresses, 0, tmp_path, HVKERAS_START_TIMEOUT="4")
    output = early.communicate(timeout=DEADLINE)[0]
    assert early.returncode != 0
    assert f"All 2 ranks must arrive within 4 s, but worker 1 ({addresses[1]}:2222) did not" in output


def test_halves_are_half_as_many_bytes_on_the_cable(network, tmp_path):
    bytes_sent = {}
    for compression in ("none", "fp16"):
        before = sent(network.hosts[1], machines.CABLE)
        env = {"COMPRESSION": compression}
        with running(network, (3, 1), tmp_path / compression, WORKERS / "compressed.py", env) as job:
            assert job.finish() == 0, job.output
        bytes_sent[compression] = sent(network.hosts[1], machines.CABLE) - before
    assert 0.4 < bytes_sent["fp16"] / bytes_sent["none"] < 0.6, bytes_sent


def test_costs_of_the_network_are_measured_or_given(network, tmp_path):
    network.limit("100mbit", "16kb")
    carried = re.compile(r"native: between hosts, a message takes [\d,]+ us, a further one [\d.]+ us, and the network"
                         r" carries ([\d,]+) Mbit/s \((.*)\)")
    for name, given in {"measured": {}, "given": {"HVKERAS_NETWORK_COSTS": "3ms, 5Gbit"}}.items():
        env = STEPS | given | {"HVKERAS_LOG_LEVEL": "DEBUG"}
        with running(network, (1, 1), tmp_path / name, env=env) as job:
            assert job.finish() == 0, job.output
            mbit, source = carried.findall(job.text(0, "stderr"))[0]
        assert (float(mbit.replace(",", "")) <= 130, source) == ((True, "measured") if name == "measured" else
                                              (False, "HVKERAS_NETWORK_COSTS"))


def test_lines_of_ucx_are_lines_of_hvkeras(network, tmp_path):
    with running(network, (1, 1), tmp_path, env=STEPS | {"UCX_LOG_LEVEL": "info"}) as job:
        assert job.finish() == 0, job.output
        lines = [line for line in job.text(0, "stderr").splitlines() if "UCX" in line]
        assert any(line.startswith("hvkeras: UCX info: ") for line in lines), lines
        assert not [line for line in job.text(0).splitlines() if "UCX" in line]  # UCX itself prints to standard output


def test_hosts_that_have_ipv6_alone(network, tmp_path):
    addresses = [f"fd00:199:7::{index + 1}" for index in range(2)]
    names = "".join(f"{address} {host.name}\n" for address, host in zip(addresses, network.hosts, strict=True))
    for host, address in zip(network.hosts, addresses, strict=True):
        ip(host, "addr", "flush", "dev", machines.CABLE)
        ip(host, "addr", "add", f"{address}/64", "dev", machines.CABLE, "nodad")
        host.names_file.write_text("127.0.0.1 localhost\n::1 localhost\n" + names)
    outputs = finished([started(network, [f"[{address}]" for address in addresses], rank, tmp_path)
                        for rank in range(2)])
    assert re.search(r"UCX [\d.]+ on cable\), 2 ranks on 2 hosts", outputs[0])


@pytest.mark.parametrize("slots", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("costs", ["1ms,1Mbit", "25us,100Gbit"])
def test_buckets_that_are_reduced_beside_the_backward_pass(network, slots, costs, tmp_path):
    """With high costs the engine's thread runs them, otherwise the thread that computes."""
    env = {"HVKERAS_BUCKET_SIZE": "16KiB", "HVKERAS_NETWORK_COSTS": costs}
    with running(network, slots, tmp_path, WORKERS / "overlapped.py", env) as job:
        assert job.finish() == 0, job.text(0, "stderr") + job.text(1, "stderr")


@pytest.mark.parametrize("slots", [(1, 1), (3, 1)], ids=str)
def test_gradients_in_8_bits(network, slots, tmp_path):
    with running(network, slots, tmp_path, WORKERS / "int8.py") as job:
        assert job.finish() == 0, "".join(job.text(rank, "stderr") for rank in range(sum(slots)))
        assert job.text(0).endswith("all\n")


def test_commits_and_backups_have_the_rounding_errors(network, tmp_path):
    with running(network, (1, 2), tmp_path, WORKERS / "int8_state.py") as job:
        assert job.finish() == 0, "".join(job.text(rank, "stderr") for rank in range(3))


def test_rounding_errors_belong_to_one_model_and_end_with_its_optimizer(network, tmp_path):
    with running(network, (1, 2), tmp_path, WORKERS / "int8_models.py") as job:
        assert job.finish() == 0, "".join(job.text(rank, "stderr") for rank in range(3))
        assert [job.text(rank) for rank in range(3)] == ["all\n"] * 3


def test_rounding_errors_outlive_steps_that_a_loss_scale_skips(network, tmp_path):
    with running(network, (1, 2), tmp_path, WORKERS / "int8_scaled.py") as job:
        assert job.finish() == 0, "".join(job.text(rank, "stderr") for rank in range(3))
        steps = json.loads(job.text(0))
    assert [step["scale"] for step in steps] == [1024, 1024, 1024, 1024, 512, 256, 256, 256, 256, 512, 256, 256]
    assert all(step["missing"] < 1e-5 and step["errors"] > 0.01 for step in steps), steps


def test_8_bits_train_as_well_as_32(network, tmp_path):
    """With small models, the losses are within those of other seeds. Without feedback, weights go elsewhere."""
    with running(network, (1, 1), tmp_path, WORKERS / "quality.py") as job:
        assert job.finish(300.0) == 0, job.text(0, "stderr") + job.text(1, "stderr")
        found = json.loads(job.text(0).splitlines()[-1])
    for kind in ("digits", "text"):
        exact, compressed = (np.array(losses) for losses in found[kind])
        assert abs(compressed.mean() - exact.mean()) < exact.std(ddof=1), found
    assert found["with feedback"] < 0.0005 < found["without feedback"], found


@pytest.mark.parametrize("slots", [(1, 1), (2, 2)], ids=str)
def test_8_bits_are_a_quarter_of_the_bytes_on_the_cable(network, slots, tmp_path):
    counts = {}
    for compression in ("none", "int8"):
        folder = tmp_path / compression
        before = sent(network.hosts[1], machines.CABLE)
        with running(network, slots, folder, WORKERS / "cable.py", {"HVKERAS_COMPRESSION": compression}) as job:
            assert job.finish() == 0, job.text(0, "stderr") + job.text(1, "stderr")
        counts[compression] = sent(network.hosts[1], machines.CABLE) - before
    with running(network, slots, tmp_path / "idle", WORKERS / "cable.py", {"CABLE_STEPS": "0"}) as job:
        before = sent(network.hosts[1], machines.CABLE)
        assert job.finish() == 0
    idle = sent(network.hosts[1], machines.CABLE) - before
    assert counts["int8"] - idle < 0.26 * (counts["none"] - idle), (counts, idle)
