"""Two hosts with different names: TF_CONFIG, mpirun, and failures across a network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness import hosts as machines
from harness import warm
from harness.checks import RESULTS, names_of_checks
from harness.launchers import BIN, clean_environment

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())

WORKERS = Path(__file__).parent / "workers"
ACROSS = WORKERS / "across_hosts.py"
UCX = r"backend native \(shared memory \(\w+\) and UCX [\d.]+ on cable\)"
SECRET = {"HVKERAS_SECRET": "not a secret outside of this test"}


@pytest.fixture(scope="module")
def pair():
    with machines.two_hosts() as hosts:
        yield hosts


def run_tf_config(pair, tmp_path, backend, script, *arguments, expect=0, extra=None, cold=False):
    """Start one worker on each host, and return their outputs."""
    cluster = {"worker": [f"{host.address}:2222" for host in pair]}
    workers = []
    for index, host in enumerate(pair):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environment = clean_environment(tmp_path) | {"TF_CONFIG": json.dumps(task), "HVKERAS_BACKEND": backend,
                                                     **SECRET, **(extra or {})}
        python = [sys.executable] if cold else warm.python(environment)
        command = host.command(*python, str(WORKERS / script), *arguments)
        workers.append(subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, start_new_session=True))
    try:
        outputs = [worker.communicate(timeout=90)[0] for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.communicate()
    assert [bool(worker.returncode) for worker in workers] == [bool(expect)] * 2, outputs
    return outputs


def facts(text):
    return [json.loads(found) for found in re.findall(r"FACTS (\{.*?\})", text)]


@pytest.mark.parametrize(("backend", "cold"), [
    pytest.param("tfdist", True, marks=pytest.mark.slow), pytest.param("horovod", False, marks=pytest.mark.slow),
    ("native", False)])
def test_tf_config_spans_two_hosts(pair, tmp_path, backend, cold):
    outputs = run_tf_config(pair, tmp_path, backend, "meet.py", cold=cold)
    for rank in (0, 1):
        (found,) = facts(outputs[rank])
        assert (found["rank"], found["sum"], found["local"], found["cross"]) == (rank, 3.0, [0, 1], [rank, 2])
    assert f"backend {backend} (" in outputs[0] and "2 ranks on 2 hosts" in outputs[0]


def test_a_failure_names_the_other_host(pair, tmp_path):
    outputs = run_tf_config(pair, tmp_path, "tfdist", "misbehave.py", "raise", expect=1)
    assert re.search(rf"rank 0 on {pair[0].name} ends because rank 1 on {pair[1].name} \(pid \d+\) failed with"
                     " ValueError: the sky is falling", outputs[0].splitlines()[-1])


def run_mpirun(pair, tmp_path, backend, script, results=None, cold=False):
    """Run two ranks on each host with mpirun, and return their output and the launcher's."""
    shell = machines.remote_shell(pair, tmp_path)
    network = f"{machines.NETWORK}.0/24"
    environment = clean_environment(tmp_path) | {"HVKERAS_BACKEND": backend, RESULTS: str(results)}
    python = [sys.executable] if cold else warm.python(environment)
    command = pair[0].command(
        str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
        "-H", ",".join(f"{host.address}:2" for host in pair), "--mca", "plm_rsh_agent", str(shell),
        "--mca", "btl", "self,tcp", "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", network,
        "--mca", "oob_tcp_if_include", network, "-x", "PATH", "-x", "HVKERAS_BACKEND", "-x", "PYTHONPATH",
        "-x", RESULTS, *python, str(script))
    job = subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output = job.communicate(timeout=240)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 0, output
    return output


@pytest.mark.parametrize(("backend", "cold"), [
    pytest.param("tfdist", True, marks=pytest.mark.nightly), ("horovod", False), ("native", False)])
def test_mpirun_spans_two_hosts(pair, tmp_path, backend, cold):
    output = run_mpirun(pair, tmp_path, backend, WORKERS / "meet.py", cold=cold)
    found = sorted(facts(output), key=lambda fact: fact["rank"])
    assert [fact["sum"] for fact in found] == [10.0] * 4
    assert [fact["local"] for fact in found] == [[0, 2], [1, 2]] * 2
    assert [fact["cross"] for fact in found] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert "4 ranks on 2 hosts" in output
    assert backend != "native" or re.search(UCX, output)


@pytest.mark.parametrize("backend", ["native", "auto"])
def test_without_ucx_the_message_says_so_and_auto_takes_the_next(pair, tmp_path, backend):
    (tmp_path / "hidden").mkdir()
    # a module instead of a package, so that there is no folder with libraries
    (tmp_path / "hidden" / "libucx.py").touch()
    path = f"{tmp_path / 'hidden'}{os.pathsep}{clean_environment(tmp_path)['PYTHONPATH']}"
    refused = backend == "native"
    outputs = run_tf_config(pair, tmp_path, backend, "meet.py", expect=int(refused), extra={"PYTHONPATH": path})
    if refused:
        said = "native on rank 0: between hosts it needs UCX, which is not installed; pip install 'hvkeras[hosts]'"
        assert any(said in output.splitlines()[-2] for output in outputs)
        assert all("in the same way as rank" in output.splitlines()[-1] or "HINT: " in output for output in outputs)
    else:
        assert re.search(r"backend (horovod|tfdist) \(", outputs[0])


@pytest.mark.slow
def test_ucx_keeps_out_of_the_process_and_leaves_nothing_in_it(pair, tmp_path):
    for output in run_tf_config(pair, tmp_path, "native", "keeps_out.py", cold=True):
        (loaded,) = (json.loads(found) for found in re.findall(r"LOADED (\{.*\})", output))
        assert loaded["environment"] == [] and loaded["signals"][0] == loaded["signals"][1]
        _, first, second = (json.loads(found) for found in re.findall(r"STATE (\{.*\})", output))
        assert first["sum"] == second["sum"] == 2.0
        assert first["descriptors"] == second["descriptors"] != first["inside"]["descriptors"]
        assert not Counter(second["threads"]) - Counter(first["threads"])  # fewer, where one of TensorFlow's ended
        assert first["threads"] != first["inside"]["threads"]


def run_hvkeras(pair, tmp_path, script, results):
    """Run two ranks of the engine native on each host with `hvkeras run`, and return their output."""
    machines.remote_shell(pair, tmp_path)
    environment = clean_environment(tmp_path) | {"HVKERAS_BACKEND": "native", RESULTS: str(results)}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    hosts = ",".join(f"{host.address}:2" for host in pair)
    done = subprocess.run(pair[0].command(str(BIN / "hvkeras"), "run", "-H", hosts, *warm.python(environment),
                                          str(script)), env=environment, cwd=tmp_path, text=True, timeout=240,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def across(pair, tmp_path_factory):
    """Results of `across_hosts.py` on each rank, by check."""
    folder = tmp_path_factory.mktemp("across")
    output = run_hvkeras(pair, folder, ACROSS, folder)
    ranks = [json.loads((folder / f"rank.{rank}.json").read_text()) for rank in range(4)]
    assert all("error" not in one for rank in ranks for one in rank.values()), output
    return {check: [rank[check]["value"] for rank in ranks] for check in ranks[0]}


@pytest.mark.parametrize("check", [name for name in names_of_checks(ACROSS) if name != "a_mismatch"])
def test_native_between_hosts_gives_what_numpy_does(check, across):
    assert across[check] == [[]] * 4


def test_native_between_hosts_names_a_mismatch(across):
    for said in across["a_mismatch"]:
        assert {"[3] on rank 0", "[3] on rank 1"} & set(re.findall(r"\[3\] on rank \d", said)), said
        assert {"[4] on rank 2", "[4] on rank 3"} & set(re.findall(r"\[4\] on rank \d", said)), said
