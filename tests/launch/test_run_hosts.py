"""`hvkeras run` over ssh: with a real sshd on the loopback, and to a second host made of namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launchers import free_ports
from launch.hvkeras_run import Started, python, run

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")
TOLD = ("[0] 0 0 1", "[1] 1 0 2", "[2] 2 1 2")  # rank, local rank, local size
TELL = "print(rank, os.environ['HVKERAS_RUN_LOCAL_RANK'], os.environ['HVKERAS_RUN_LOCAL_SIZE'], os.getcwd())"


@pytest.fixture
def fake_ssh(tmp_path: Path) -> Path:
    """A folder with an `ssh` that runs its command locally, in a minimal environment like sshd's."""
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(f"""#!/bin/sh
printf '%s\\n' "$@" > {tmp_path}/ssh-arguments
for command; do :; done
echo "Welcome to node2!"
exec env -i PATH=/usr/bin:/bin HOME={tmp_path} HARNESS_JOB="$HARNESS_JOB" ONLY_THERE=yes sh -c "$command"
""")
    script.chmod(0o755)
    return script.parent


def two_hosts(*flags: str) -> list[str]:
    return ["-H", "localhost:1,node2:2", "--network-interface", "lo", *flags]


def test_ranks_spread_over_hosts_in_order(tmp_path: Path, fake_ssh: Path) -> None:
    done = run(two_hosts(*python(TELL)), tmp_path, path=fake_ssh)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{told} {tmp_path}" for told in TOLD]


def test_the_environment_reaches_other_hosts_but_not_what_is_their_own(tmp_path: Path, fake_ssh: Path) -> None:
    names = ["MINE", "SSH_AUTH_SOCK", "ONLY_THERE", *(f"HOROVOD_{name}" for name in (
        "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"))]
    done = run(two_hosts(*python(f"print(*(os.environ.get(name) for name in {names}))")), tmp_path,
               env={"MINE": "a b'c", "SSH_AUTH_SOCK": "/here"}, path=fake_ssh)
    assert sorted(done.stdout.splitlines()) == [
        "[0] a b'c /here None 0 3 0 1 0 2 localhost", "[1] a b'c None yes 1 3 0 2 1 2 node2",
        "[2] a b'c None yes 2 3 1 2 0 1 node2"]


def test_ssh_gets_port_and_key_and_neither_secret_nor_environment(tmp_path: Path, fake_ssh: Path) -> None:
    code = "print(os.environ['HVKERAS_SECRET'])"
    done = run(two_hosts("-p", "2222", "-i", "key", "--start-timeout", "20", *python(code)), tmp_path,
               env={"MINE": "confidential"}, path=fake_ssh)
    arguments = (tmp_path / "ssh-arguments").read_text()
    assert arguments.split()[:11] == ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o",
                                      "ServerAliveInterval=15", "-p", "2222", "-i", "key"]
    secret = done.stdout.split()[1]
    assert len(secret) == 64
    assert secret not in arguments
    assert "confidential" not in arguments


def test_a_remote_failure_is_reported_last_and_keeps_its_code(tmp_path: Path, fake_ssh: Path) -> None:
    done = run(two_hosts(*python("sys.exit(9) if rank == 2 else time.sleep(1000)")), tmp_path, path=fake_ssh)
    assert done.returncode == 9
    assert done.stderr.splitlines()[-1].startswith("hvkeras run: rank 2 on ")


def test_remote_ranks_end_with_a_killed_launcher(tmp_path: Path, fake_ssh: Path) -> None:
    started = Started(two_hosts(*python("print('ready'); time.sleep(1000)")), tmp_path, path=fake_ssh)
    started.wait_for("ready", 3)
    started.process.kill()
    started.finish()
    assert started.orphans == []


def test_a_host_that_does_not_answer_ends_the_job_before_any_rank_starts(tmp_path: Path, fake_ssh: Path) -> None:
    (fake_ssh / "ssh").write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    done = run(two_hosts(*python("print('started')")), tmp_path, path=fake_ssh)
    assert done.returncode == 1
    assert "answer over ssh without a password" in done.stderr
    assert "(Permission denied (publickey).)" in done.stderr
    assert "HINT: try: ssh -o BatchMode=yes node2 " in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_a_host_that_says_nothing_is_given_up_after_the_start_timeout(tmp_path: Path, fake_ssh: Path) -> None:
    (fake_ssh / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    done = run(two_hosts("--start-timeout", "1", *python("")), tmp_path, path=fake_ssh)
    assert done.returncode == 1
    assert "no answer for 1 s" in done.stderr


def test_a_connection_that_breaks_is_reported_last(tmp_path: Path, fake_ssh: Path) -> None:
    started = Started(two_hosts("--output-filename", "logs", *python("print(os.getppid()); time.sleep(1000)")),
                      tmp_path, path=fake_ssh)
    log = tmp_path / "logs" / "rank.1" / "stdout"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(int(log.read_text()), signal.SIGKILL)  # the agent on node2, whose ranks are killed with it
    done = started.finish()
    assert done.returncode != 0
    assert "rank 1 on " in done.stderr.splitlines()[-1]
    assert "was lost with its host" in done.stderr.splitlines()[-1]
    assert started.orphans == []


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host_that_was_lost(tmp_path: Path, fake_ssh: Path) -> None:
    code = """size = os.environ['HVKERAS_RUN_SIZE']
if size == '3':
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getppid(), 9)  # the agent on node2
    time.sleep(1000)
print('size', size)"""
    done = run(two_hosts("--min-np", "1", *python(code)), tmp_path, path=fake_ssh)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] size 1\n"
    assert "hvkeras run: sets node2 aside, which was lost, for the rest of the job" in done.stderr.splitlines()
    assert done.stderr.splitlines()[-2:] == [
        "hvkeras run: 1 rank now (1 on localhost), 3 before", "hvkeras run: restarts all ranks, reset 1 of at most 3"]


def test_a_folder_that_another_host_lacks_is_named(tmp_path: Path, fake_ssh: Path) -> None:
    script = fake_ssh / "ssh"
    script.write_text(script.read_text().replace('exec env', f"mv {tmp_path}/work {tmp_path}/elsewhere\nexec env"))
    (tmp_path / "work").mkdir()
    done = run(["-H", "node2:1", "--network-interface", "lo", *python("")], tmp_path / "work", path=fake_ssh)
    assert done.returncode == 127
    assert f"Received: command='{tmp_path}/work'" in done.stderr


def test_a_host_without_a_route_asks_for_an_interface(tmp_path: Path, fake_ssh: Path) -> None:
    done = run(["-H", "no.such.host.invalid:1", *python("")], tmp_path, path=fake_ssh)
    assert done.returncode == 2
    assert "HVKERAS_NETWORK_INTERFACES" in done.stderr


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A real sshd on the loopback with a throwaway key; yields a folder with `ssh`, and flags for it."""
    if SSHD is None or os.getuid() != 0:
        pytest.skip("needs root and sshd (apt-get install openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    (port,) = free_ports(1)
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {(tmp_path / 'host.pub').read_text()}")
    (tmp_path / "config").write_text(f"Host node2\n  HostName 127.0.0.1\n  UserKnownHostsFile {tmp_path}/known\n")
    real = shutil.which("ssh")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {real} -F {tmp_path}/config "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    server = subprocess.Popen([SSHD, "-D", "-f", "/dev/null", "-h", str(tmp_path / "host"), "-p", str(port), "-o",
                               "ListenAddress=127.0.0.1", "-o", f"AuthorizedKeysFile={tmp_path}/authorized", "-o",
                               "StrictModes=no", "-o", "UsePAM=no", "-o", "PidFile=none"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield tmp_path / "bin", ["-p", str(port), "-i", str(tmp_path / "user")]
    server.terminate()
    server.wait(timeout=10)


def test_a_real_sshd_starts_ranks(tmp_path: Path, sshd: tuple[Path, list[str]]) -> None:
    path, flags = sshd
    done = run(two_hosts(*flags, *python(TELL)), tmp_path, env={"MINE": "1"}, path=path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{told} {tmp_path}" for told in TOLD]


def test_a_real_sshd_lets_no_rank_outlive_a_killed_launcher(tmp_path: Path, sshd: tuple[Path, list[str]]) -> None:
    path, flags = sshd
    started = Started(two_hosts(*flags, *python("print('ready'); time.sleep(1000)")), tmp_path, path=path)
    started.wait_for("ready", 3)
    started.process.kill()
    started.finish()
    assert started.orphans == []


def test_a_wrong_key_is_reported_in_sshs_words(tmp_path: Path, sshd: tuple[Path, list[str]]) -> None:
    path, flags = sshd
    done = run(two_hosts(*flags[:2], "-i", str(tmp_path / "host"), *python("")), tmp_path, path=path)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr


@pytest.fixture
def second_host(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A second host on this machine, with its own network and name; yields a folder with `ssh`, and its address."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make a second host of namespaces")
    name, net = f"hvk{os.getpid()}", f"10.213.{os.getpid() % 250}"
    commands = [f"ip netns add {name}", f"ip link add {name}a type veth peer name {name}b",
                f"ip link set {name}b netns {name}", f"ip addr add {net}.1/24 dev {name}a", f"ip link set {name}a up",
                f"ip netns exec {name} ip addr add {net}.2/24 dev {name}b",
                f"ip netns exec {name} ip link set {name}b up", f"ip netns exec {name} ip link set lo up"]
    try:
        for command in commands:
            if subprocess.run(command.split(), capture_output=True).returncode:
                pytest.skip(f"this machine cannot make a second host: {command}")
        script = tmp_path / "bin" / "ssh"
        script.parent.mkdir()
        script.write_text(f"""#!/bin/sh
for command; do :; done
export command
exec ip netns exec {name} unshare --uts sh -c 'hostname node2; exec sh -c "$command"'
""")
        script.chmod(0o755)
        yield script.parent, f"{net}.2"
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_script_of_tf_distribute_alone_spans_two_hosts(tmp_path: Path, second_host: tuple[Path, str]) -> None:
    path, address = second_host
    command = [sys.executable, str(Path(__file__).parent / "workers" / "plain_strategy.py")]
    done = run(["-H", f"localhost:1,{address}:1", "--tf-config", *command], tmp_path, path=path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] worker 0 has 3.0", "[1] worker 1 has 3.0"]


@pytest.mark.slow
def test_a_job_trains_on_two_hosts(tmp_path: Path, second_host: tuple[Path, str]) -> None:
    path, address = second_host
    code = """
import hvkeras as hvd, tensorflow as tf
hvd.init("tfdist")
print("sum", float(hvd.allreduce(tf.constant(float(rank + 1)), op=hvd.Sum)), "cross", hvd.cross_size(),
      "at", os.environ["HVKERAS_RUN_CONTROL"].split(":")[0])
"""
    done = run(["-H", f"localhost:1,{address}:1", *python(code)], tmp_path, path=path)
    assert done.returncode == 0, done.stderr
    gateway = address.removesuffix("2") + "1"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] sum 3.0 cross 2 at {gateway}" for rank in (0, 1)]
    assert "2 ranks on 2 hosts, launched by hvkeras run" in done.stderr
