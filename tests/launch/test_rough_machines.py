"""Machines without TensorFlow, streams, a folder, disk space or a host name: one line reports the problem."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness import hosts
from harness.launchers import BIN, clean_environment
from hvkeras.control import rendezvous
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.errors import MachineError
from hvkeras.settings import Settings
from launch.hvkeras_run import python, warm_ranks
from launch.hvkeras_run import run as run_hvkeras

MEET = Path(__file__).parent / "workers" / "meet.py"
# Hides TensorFlow and Keras from a Python with this folder in its path.
NO_TENSORFLOW = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name.startswith("tensorflow") else find(name, *more))
"""


def shell(text: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run shell commands with `hvkeras` on the PATH."""
    environment = clean_environment(folder) | dict(env or {})
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    return subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=120, check=False)


def test_a_launcher_without_standard_streams_runs_its_job(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    # Rank 1 fails after the end of rank 0, which the job would otherwise terminate.
    code = """
import pathlib, time
print('here'); print('there', file=sys.stderr)
while rank and not pathlib.Path(done).exists():
    time.sleep(0.05)
import atexit
atexit.register(lambda: rank or pathlib.Path(done).touch())
sys.exit(3 * rank)"""
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        command = shlex.join(python(f"done = {str(tmp_path / f'done {closed}')!r}{code}"))
        done = shell(f"hvkeras run -np 2 --output-filename logs {command} {closed}", tmp_path)
        assert done.returncode == 3
        assert "Traceback" not in done.stdout + done.stderr
        for rank in range(2):
            assert (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text() == "here\n"
            assert (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text() == "there\n"


def test_ranks_without_standard_streams_connect_and_fail_as_others_do(tmp_path: Path) -> None:
    code = """
import pathlib, sys
import hvkeras as hvd
if rank == 1:  # what a rank finds that was started without them
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(number)
        setattr(sys, name, None)
hvd.init("native")
if rank == 1:
    pathlib.Path("streams").write_text(" ".join(str(stream.fileno()) for stream in (sys.stdin, sys.stdout, sys.stderr)))
    raise ArithmeticError("in the dark")
hvd.allreduce(1.0)
"""
    env = {"HVKERAS_EXIT_GRACE": "1"}
    done = run_hvkeras(["-np", "2", *warm_ranks(python(code), env)], tmp_path, env)
    assert done.returncode == 1
    assert (tmp_path / "streams").read_text() == "0 1 2"
    assert done.stderr.splitlines()[-1] == "ArithmeticError: in the dark"


def test_a_folder_that_was_removed_is_reported(tmp_path: Path) -> None:
    for command in ("hvkeras run -np 1 true", "hvkeras compare -np 2 true"):
        done = shell(f"mkdir gone; cd gone; rmdir ../gone; {command}", tmp_path)
        assert done.returncode == 2
        assert "The current folder must exist (No such file or directory): it was removed" in done.stderr
        assert "Traceback" not in done.stderr


def test_too_few_open_files_are_reported(tmp_path: Path) -> None:
    done = shell("ulimit -n 9; hvkeras run -np 2 true", tmp_path)
    assert done.returncode == 1
    assert done.stderr == ("hvkeras run: A launcher of 2 ranks needs 46 open files. Received: allowed=9."
                           "\nHINT: ulimit -n 46, or lower -np.\n")
    done = shell("ulimit -n 84; hvkeras run -np 40 sleep 1000", tmp_path)  # the agent needs two for each rank
    assert done.returncode == 1
    assert done.stderr.endswith("hvkeras run: The agent of 40 ranks needs 100 open files. Received: allowed=84."
                                "\nHINT: ulimit -n 100, or lower -np.\n")


def test_a_host_that_allows_too_few_open_files_says_so(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nulimit -n 84\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    done = shell("PATH=.:$PATH hvkeras run -H node2:40 --network-interface lo sleep 1000", tmp_path)
    assert done.returncode == 127
    assert "could not be started: The command must start on every host (Too many open files)" in done.stderr
    assert "HINT: raise the limit of open files, which ulimit -n shows, or lower -np" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_keep_the_limit_of_open_files_that_launcher_and_agent_raise(tmp_path: Path) -> None:
    done = shell("ulimit -Sn 100; hvkeras run -np 60 --output-filename logs sh -c 'ulimit -Sn; ulimit -Hn'; ulimit -Hn",
                 tmp_path)
    assert done.returncode == 0, done.stderr
    *shown, hard = done.stdout.splitlines()
    assert sorted(shown) == sorted(f"[{rank}] {limit}" for rank in range(60) for limit in ("100", hard))
    assert [(tmp_path / "logs" / f"rank.{rank:02}" / "stdout").read_text() for rank in range(60)] == 60 * [
        f"100\n{hard}\n"]


def test_a_machine_without_tensorflow_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TENSORFLOW)
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_hvkeras(["-np", "1", *python("import hvkeras as hvd; hvd.init()")], tmp_path, env)
    assert done.returncode == 1
    told = "NotInstalledError: TensorFlow must be installed where ranks run"
    fix = "pip install 'tensorflow>=2.16,<2.22', or tensorflow-cpu"
    assert told in done.stderr
    assert fix in done.stderr
    done = run_hvkeras(["-np", "1", *python("import hvkeras as hvd; hvd.DistributedOptimizer")], tmp_path, env)
    assert told in done.stderr
    for package in ("tensorflow", "tensorflow.keras", "keras.callbacks", "callbacks", "elastic"):
        done = shell(shlex.join([sys.executable, "-c", f"import hvkeras.{package}"]), tmp_path, env)
        assert done.stderr.splitlines()[-2].startswith(f"hvkeras.errors.{told}"), done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"HINT: {fix}"), done.stderr
    done = run_hvkeras(["--json"], tmp_path, env, command="doctor")
    assert done.returncode == 1
    assert done.stdout.count(fix) == 3  # TensorFlow, and the engines that need it
    assert "g++" not in done.stdout


@pytest.mark.parametrize("what", ["a file", "of another user", "mode 0750"])
def test_a_folder_for_the_secret_that_will_not_do(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"hvkeras-{os.getuid()}"
    if what == "a file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o750)
    if what == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    launch = Launch("srun (Slurm)", 0, 2, Rendezvous("folder", job="7"), local_size=2)
    with pytest.raises(MachineError, match="The folder that carries the job's secret must belong to you alone") as told:
        rendezvous.connect(launch, Settings({}), lambda _: None)
    assert "set HVKERAS_RENDEZVOUS_DIR to a folder of yours, the same for all ranks" in str(told.value)
    assert ("chmod 700" in str(told.value)) == (what == "mode 0750")


@pytest.mark.parametrize("backend", ["horovod", pytest.param("native", marks=pytest.mark.nightly)])
def test_a_host_whose_name_is_unknown(backend: str, tmp_path: Path) -> None:
    if missing := hosts.missing():
        pytest.skip(missing)
    arguments = shlex.join(warm_ranks([sys.executable, str(MEET)]))
    done = shell(f"unshare --uts bash -c 'hostname no-such-host-here; hvkeras run -np 2 --backend {backend}"
                 f" {arguments}'", tmp_path, {"PYTHONPATH": str(Path(__file__).parents[1])})
    if backend == "horovod":
        assert done.returncode == 1
        assert "MachineError: Horovod's Gloo needs each host's own name to resolve to an address." in done.stderr
        assert "HINT: write 127.0.0.1 and no-such-host-here into /etc/hosts on this host" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small /dev/shm")
def test_ranks_without_shared_memory_use_another_backend_and_say_so_once(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, str(MEET)])
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    lacking = "/dev/shm on {} has 1 of 1 MiB free, and 2 ranks there need 9 MiB"
    done = shell(f"unshare -m bash -c '{mount}; hvkeras run -np 2 {command}'", tmp_path, {"HVKERAS_BACKEND": "auto"})
    assert done.returncode == 0, done.stderr
    host = socket.gethostname()
    assert done.stderr.count(f"hvkeras: backend native is not used: {lacking.format(host)};") == 1
    assert "hvkeras: backend native (" not in done.stderr
    done = shell(f"unshare -m bash -c '{mount}; hvkeras run -np 2 --backend native {command}'", tmp_path)
    assert done.returncode == 1
    assert f"native: {lacking.format(host)}" in done.stderr
    assert "HINT: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm" in done.stderr
