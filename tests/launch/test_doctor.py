"""`hvkeras doctor` on this machine, on a damaged one, and on two hosts."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from harness import hosts as machines
from harness.launchers import BIN, clean_environment
from harness.processes import run_python
from hvkeras.diagnostics.doctor import hosts, machine, software
from hvkeras.diagnostics.doctor.machine import NOTE, OK, PROBLEM
from launch.hvkeras_run import run


def rows(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in report["findings"]}


def test_this_machine_is_fit(tmp_path: Path) -> None:
    done = run((), tmp_path, command="doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("Training will work")
    assert "two ranks divide 99.9% of the work of a step" in done.stdout
    assert f"tf.keras is keras {metadata.version('keras')}" in done.stdout


@pytest.mark.nightly  # tests/unit/doctor checks the same facts
def test_what_hinders_is_named_with_what_to_do(tmp_path: Path) -> None:
    """An invalid setting, an mpi4py whose import kills the process, and a Horovod that is not usable."""
    for name, content in (("mpi4py", "import os\nos.abort()\n"), ("horovod", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(content)
    environment = {"HVKERAS_BACKENDS": "native", "PYTHONPATH": str(tmp_path), "http_proxy": "http://proxy:3128"}
    done = run(["--json"], tmp_path, environment, command="doctor")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    found = rows(report["hosts"][0])
    assert found["settings"]["state"] == PROBLEM
    assert found["settings"]["fix"] == "did you mean HVKERAS_BACKEND."
    assert found["MPI"]["state"] == NOTE
    assert "mpi4py cannot be imported (the import ended with code -6)" in found["MPI"]["found"]
    assert found["backend horovod"]["state"] == PROBLEM
    assert found["proxies"]["state"] == NOTE
    assert found["TensorFlow"]["state"] == found["backend native"]["state"] == OK  # checked after mpi4py
    assert report["hosts"][0]["versions"]["TensorFlow"] == found["TensorFlow"]["found"]


@pytest.mark.nightly
def test_two_hosts_know_and_reach_each_other(tmp_path: Path) -> None:
    if missing := machines.missing():
        pytest.skip(missing)
    with machines.two_hosts() as (left, right):
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(f"""#!/bin/sh
for command; do :; done
exec ip netns exec {right.namespace} unshare --uts sh -c "hostname {right.name}; $command"
""")
        ssh.chmod(0o755)
        environment = clean_environment(tmp_path)
        environment["PATH"] = f"{ssh.parent}:{environment['PATH']}"
        command = left.command(str(BIN / "hvkeras"), "doctor", "--json", "-H", f"{left.name},{right.name},nowhere")
        done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    own, other = (rows(host) for host in report["hosts"][:2])
    assert [host["name"] for host in report["hosts"]] == [left.name, right.name, "nowhere"]
    for found in (own, other):
        assert found["names"]["state"] == PROBLEM
        assert "no address here for nowhere" in found["names"]["found"]
    assert other["route"]["state"] == OK
    assert other["route"]["found"].startswith(f"{right.address} reaches {left.address}:")
    assert other["clock"]["state"] == OK
    assert report["all_hosts"] == [{"check": "versions", "state": OK, "found": "the same on 3 hosts", "fix": ""}]


@pytest.mark.parametrize(("answer", "code", "fix"), [
    ("Permission denied (publickey).", 255, "let ssh connect without a password"),
    ("ssh: Could not resolve hostname 192.0.2.1: Name or service not known", 255, "correct the name, or add it to DNS"),
    ("sh: 1: python: not found", 127, "install the same Python and hvkeras there")])
def test_a_host_that_cannot_be_asked_is_a_problem(answer: str, code: int, fix: str, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit {code}\n")
    ssh.chmod(0o755)
    done = run(["-H", "192.0.2.1", "--json"], tmp_path, command="doctor", path=tmp_path)
    assert done.returncode == 1
    found = rows(json.loads(done.stdout)["hosts"][1])["ssh"]
    assert found["state"] == PROBLEM
    assert f"({answer})" in found["found"]
    assert found["fix"].startswith(fix)
    assert "ssh -T -o BatchMode=yes" in found["fix"]


def test_hosts_that_differ_are_distinguished() -> None:
    same = {"TensorFlow": "2.21.0", "Horovod": ""}
    found = list(hosts.differences({"a": same, "b": {"TensorFlow": "2.20.0", "Horovod": "0.28.1"}, "c": {}}))
    assert [(row.check, row.state) for row in found] == [("TensorFlow", PROBLEM), ("Horovod", NOTE)]
    assert found[0].found == "2.21.0 on a, 2.20.0 on b"
    assert found[1].found == "none on a, 0.28.1 on b"
    assert [row.state for row in hosts.differences({"a": same, "b": same})] == [OK]


def test_a_first_host_that_does_not_answer_is_a_problem() -> None:
    calls = hosts.CallServer("127.0.0.1")
    address = "{}:{}".format(*calls.server.start())
    assert hosts.call(address, "node2", calls.secret).state == OK
    assert abs(calls.handler.clocks.pop("node2")) < hosts.MAX_CLOCK_OFFSET
    assert hosts.call(address, "node2", "another").state == PROBLEM
    assert not calls.handler.clocks
    calls.server.stop()
    found = hosts.call(address, "node2", calls.secret)
    assert found.state == PROBLEM
    assert "firewall" in found.fix


@pytest.mark.parametrize(("launcher", "library", "state"), [
    ("Open MPI v4.1.8", "Open MPI v4.1.6, package: Debian", OK),
    ("Open MPI v4.1.8", "Open MPI v5.0.3", PROBLEM),
    ("Open MPI v4.1.8", "MPICH Version:      4.2.1", PROBLEM),
    ("MPICH Version: 2021.13", "Intel(R) MPI Library 2021.13 for Linux* OS", OK),
])
def test_launcher_and_library_of_mpi_belong_together(launcher: str, library: str, state: str) -> None:
    assert software._compare_mpi("/bin/mpirun", launcher, library).state == state


def test_limits_of_the_machine_are_notes(tmp_path: Path) -> None:
    code = "from hvkeras.diagnostics.doctor import machine; print(machine.open_files().state)"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        done = run_python(code, cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert done.stdout.split() == [NOTE]
    assert machine.shared_memory(Path("/nowhere")).state == PROBLEM


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small /dev/shm")
def test_shared_memory_that_is_too_small_for_two_ranks_is_a_problem(tmp_path: Path) -> None:
    code = "from hvkeras.diagnostics.doctor import machine; print(*machine.shared_memory().as_json().values(), sep='|')"
    show = shlex.join([sys.executable, "-c", code])
    commands = f"mount -t tmpfs -o size=1m tmpfs /dev/shm; {show}; mount -o remount,size=30m /dev/shm; {show}"
    done = subprocess.run(["unshare", "-m", "bash", "-c", commands], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    small, moderate = (line.split("|") for line in done.stdout.splitlines())
    assert small[1] == PROBLEM
    assert small[2].startswith("1 of 1 MiB free in /dev/shm: 2 ranks of the backend native need 9 MiB")
    assert small[3] == "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    assert moderate[1] == NOTE
