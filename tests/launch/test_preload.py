"""`hvkeras run --preload`: ranks that are forked do what new Python processes do, or it is said that they are not."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.processes import below
from hvkeras.errors import MachineError
from hvkeras.launcher.fork_server import split_command
from hvkeras.launcher.host_agents import AGENT, BOOT
from hvkeras.launcher.preload import preload_of
from hvkeras.launcher.shared_fork_server import SharedForkServer
from hvkeras.settings import Settings
from launch.hvkeras_run import Started, run

WORKERS = Path(__file__).parent / "workers" / "preload"
STATE = WORKERS / "state.py"
FLAGS = (["--preload", "psutil"], ["--no-preload"])


def states(command: list[str], folder: Path, preload: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the states that the ranks of a job print, with and without --preload, by rank."""
    found = []
    for flags in (["--preload", preload], ["--no-preload"]):
        done = run(["-np", "2", *flags, *command], folder, {"HVKERAS_PRELOAD": "nothing", **(env or {})})
        assert done.returncode == 0, done.stderr
        assert "in spite of --preload" not in done.stderr
        found.append([json.loads(line[4:]) for line in sorted(done.stdout.splitlines())])
    warm, cold = found
    assert len(warm) == len(cold) == 2
    return [{name: (one[name], other[name]) for name in one if one[name] != other[name]}
            for one, other in zip(warm, cold, strict=True)]


@pytest.mark.parametrize(("command", "program"), [
    ("python train.py -m x", "train.py -m x"), ("python3.11 -u -W error -Xdev -m train -c", "-m train -c"),
    ("python -c pass -u", "-c pass -u"), ("python -W train.py", None), ("python", None), ("python -", None),
    ("python -i train.py", None), ("python -m", None), ("python --help-all", None)])
def test_a_command_line_of_python_is_split_as_python_does(command: str, program: str | None) -> None:
    words = command.split()
    found = split_command(words)
    assert (None if found is None else " ".join(found[1])) == program
    assert found is None or [*found[0], *found[1]] == words


def without_pids(text: str) -> str:
    """Return a text without process and thread IDs, and without the outermost frames in Python's faulthandler."""
    own = re.compile(r'File "(hvkeras.launcher.fork_server|<string>)"')
    lines = [line for line in text.splitlines() if not own.search(line)]
    return re.sub(r"\(pid \d+\)|0x[0-9a-f]+", "", "\n".join(lines))


@pytest.mark.parametrize("kind", ["script", "console script", *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("options", "module", "code"))])
def test_the_state_of_a_process_is_that_of_a_new_one(kind: str, tmp_path: Path) -> None:
    os.symlink(STATE, tmp_path / "state.py")
    console = tmp_path / "state-here"
    console.write_text(f"#!{sys.executable}\n{STATE.read_text()}")
    console.chmod(0o755)
    command = {
        "script": [sys.executable, "./state.py", "--epochs", "3"],
        "options": [sys.executable, "-X", "dev", "-Werror", "-B", "-O", "state.py"],
        "module": [sys.executable, "-m", "state", "-m"],
        "code": [sys.executable, "-c", STATE.read_text(), "-c"],
        "console script": ["./state-here", "x"],
    }[kind]
    assert states(command, tmp_path, "xml.dom.minidom,psutil") == [{}, {}]


@pytest.mark.slow
def test_an_import_has_the_effects_that_it_has_in_a_new_process(tmp_path: Path) -> None:
    found = states([sys.executable, str(STATE), "tensorflow"], tmp_path, "numpy,tensorflow,keras")
    assert found == [{}, {}]


PRINTS = "import sys; print('out'); print('err', file=sys.stderr)\n"


ENDS = [
    (PRINTS + "def f():\n    1 / 0\nf()", 1),
    (PRINTS + "sys.exit(7)", 7),
    (PRINTS + "sys.exit('told why')", 1),
    (PRINTS + "raise KeyboardInterrupt", 128 + signal.SIGINT),
    (PRINTS + "import os; os.abort()", 128 + signal.SIGABRT),
    (PRINTS + "import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    (PRINTS + "import os; os._exit(5)", 5),
    (PRINTS + "import atexit; atexit.register(print, 'at exit'); sys.stdout.write('not flushed')", 0),
    (PRINTS + "sys.excepthook = lambda *found: print('hook', [one for one in found[2].tb_frame.f_code.co_name])\n1 / 0",
     1),
    (PRINTS + "x = (", 1),
    (PRINTS + "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('of a chain')", 1),
    (PRINTS + "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()", 0),
    (PRINTS + "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
     128 + signal.SIGXCPU),
]


@pytest.mark.parametrize(("code", "codes", "kind"), [
    *((code, codes, "script") for code, codes in ENDS[:6]),
    *(pytest.param(code, codes, "script", marks=pytest.mark.slow) for code, codes in ENDS[6:]),
    *(pytest.param(code, codes, "module", marks=pytest.mark.slow) for code, codes in ENDS)])
def test_its_end_and_output_are_those_of_a_new_process(code: str, codes: int, kind: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, *(["-m", "program"] if kind == "module" else ["program.py"])]
    warm, cold = (run(["-np", "1", *flags, *command], tmp_path) for flags in FLAGS)
    assert warm.returncode == cold.returncode == codes
    assert warm.stdout == cold.stdout
    assert without_pids(warm.stderr) == without_pids(cold.stderr)


def test_random_numbers_that_a_script_has_seeded_are_those_of_a_new_process(tmp_path: Path) -> None:
    """Imports draw random numbers, too: `rich.style`, which Keras imports."""
    (tmp_path / "draws.py").write_text("import random\nfrom random import randint\n"
                                       "NUMBERS = [randint(0, 2**70), random.random(), random.choice('abc')]\n")
    (tmp_path / "train.py").write_text("import random; random.seed(1)\nimport draws, rich.style\n"
                                       "print(random.random(), random.getrandbits(20), random.choice(range(99)))\n")
    warm, cold = (run(["-np", "1", *flags, sys.executable, "train.py"], tmp_path)
                  for flags in (["--preload", "draws,rich.style"], ["--no-preload"]))
    assert warm.stdout == cold.stdout != ""


def test_the_modules_are_imported_once_on_each_host(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("import os\nwith open('imports', 'a') as file:\n"
                                         "    file.write(f'{os.getpid()}\\n')\nprint('imported')\n")
    (tmp_path / "train.py").write_text("import os, random, numpy as np, counted\n"
                                       "print(os.getpid(), random.random(), np.random.random())\n")
    done = run(["-np", "4", "--preload", "numpy,counted", sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    server = (tmp_path / "imports").read_text().split()
    printed = sorted(line[4:] for line in done.stdout.splitlines())
    assert len(server) == 1
    assert printed[-4:] == ["imported"] * 4, "each rank shows what its import prints"
    pids, ours, numpys = zip(*(line.split() for line in printed[:4]), strict=True)
    assert len(set(pids)) == len(set(ours)) == len(set(numpys)) == 4
    assert server[0] not in pids


def test_an_error_of_the_import_is_that_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("print('half way')\n1 / 0\n")
    for flags in ([], ["--reset-limit", "3"], ["--min-np", "1"]):
        done = run(["-np", "2", *flags, "--preload", "broken", sys.executable, "-c", "print('runs')"], tmp_path)
        assert done.returncode == 1
        assert "runs" not in done.stdout
        assert done.stderr.count("Traceback") == 1, "no restart helps"
        assert 'broken.py", line 2, in <module>' in done.stderr
        assert done.stderr.splitlines()[-1].endswith(", as the imports of --preload failed: ZeroDivisionError: division"
                                                     " by zero")


@pytest.mark.parametrize(("source", "text"), [
    ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
     "must not start threads, which do not survive a fork. Received: module=unfit, threads=["),
    ("import os\nos.symlink('/dev/null', 'x') if False else None\nfile = open('/dev/nvidiactl')",
     "must not open a GPU, whose state does not survive a fork. Received: module=unfit, file=/dev/nvidiactl"),
])
def test_modules_that_do_not_survive_a_fork_are_refused(source: str, text: str, tmp_path: Path) -> None:
    if "nvidia" in source and not make_device(Path("/dev/nvidiactl")):
        pytest.skip("the test needs to create a device file")
    try:
        (tmp_path / "unfit.py").write_text(source)
        done = run(["-np", "2", "--preload", "unfit", sys.executable, "-c", "print('runs')"], tmp_path)
    finally:
        if "nvidia" in source:
            Path("/dev/nvidiactl").unlink()
    assert done.returncode == 1
    assert text in done.stderr
    assert "HINT: leave unfit out of --preload" in done.stderr


def make_device(path: Path) -> bool:
    """Create a device file that behaves as /dev/null; return whether that was possible."""
    if path.exists():
        return False
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        path.open("rb").close()
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


LISTENS = "import os\nchosen = os.environ.get('LISTENS', 'nothing')\n"


def test_a_variable_that_an_import_reads_is_never_ignored(tmp_path: Path) -> None:
    """A script sets it before its own import: a Python package is imported again, TensorFlow cannot be."""
    (tmp_path / "listens.py").write_text(LISTENS)
    (tmp_path / "uses.py").write_text("import listens\nfound = listens.chosen\n")
    (tmp_path / "train.py").write_text(
        "import os\nimport uses_not\nos.environ['LISTENS'] = 'changed'\nimport uses, listens\n"
        "assert uses.listens is listens\nprint(uses.found)\n")
    (tmp_path / "uses_not.py").write_text("")
    done = run(["-np", "1", "--preload", "uses_not,uses", sys.executable, "train.py"], tmp_path, {"LISTENS": "first"})
    assert done.stdout == "[0] changed\n", done.stderr
    after = "import listens, os\nos.environ['LISTENS'] = 'changed'\nimport uses\nprint(uses.found)"
    done = run(["-np", "1", "--preload", "uses", sys.executable, "-c", after], tmp_path, {"LISTENS": "first"})
    assert done.stdout == "[0] first\n", "as in a new process, where the import came before"


@pytest.mark.parametrize(("change", "refused"), [("KERAS_BACKEND=jax", True), *(
    pytest.param(change, refused, marks=pytest.mark.slow) for change, refused in (
        ("TF_ENABLE_ONEDNN_OPTS=0", True), ("OMP_NUM_THREADS=1", True), ("KERAS_BACKEND=tensorflow", False),
        ("TF_USE_LEGACY_KERAS=0", False), ("CUDA_VISIBLE_DEVICES=1", False),
        ("XLA_FLAGS=--xla_dump_to=dumped", False), ("TF_NUM_INTRAOP_THREADS=1", False), ("PATH=/usr/bin", False)))])
def test_a_script_that_changes_a_variable_of_tensorflow(change: str, refused: bool, tmp_path: Path) -> None:
    name, _, value = change.partition("=")
    (tmp_path / "train.py").write_text(f"""import os
os.environ[{name!r}] = {value!r}
import keras
import tensorflow as tf
double = tf.function(lambda x: x * 2, jit_compile=True)
print(float(double(tf.constant(1.0))), keras.backend.backend(), os.path.isdir('dumped'))
""")
    done = run(["-np", "1", "--preload", "tensorflow,keras", sys.executable, "train.py"], tmp_path)
    if refused:
        assert done.returncode == 1
        assert f"Received: {name}={value!r}, which was " in done.stderr
        assert f"HINT: set {name} before hvkeras run, or start with --no-preload." in done.stderr
        if name == "KERAS_BACKEND":  # JAX is not installed
            return
        done = run(["-np", "1", "--preload", "tensorflow,keras", sys.executable, "train.py"], tmp_path, {name: value})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[0] 2.0 tensorflow {'XLA' in name}\n"


@pytest.mark.parametrize(("command", "text"), [
    (["sh", "-c", "echo ran"], "sh is not Python"),
    ([sys.executable, "-v", "-c", "print('ran')"], "a fork server runs scripts, -m and -c"),
    (["env", sys.executable, "-c", "print('ran')"], "env is not Python"),
    ([sys.executable, "folder"], "folder is not a Python script"),
])
def test_other_commands_are_started_as_usual_and_it_is_said(command: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("print('ran')")
    done = run(["-np", "2", "--preload", "psutil", *command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] ran", "[1] ran"]
    assert done.stderr.count(
        f"hvkeras run: ranks are started as new Python processes in spite of --preload: {text}\n") == 1


def test_errors_of_a_start_are_those_of_a_new_process(tmp_path: Path) -> None:
    for command in ([sys.executable, "missing.py"], ["./pythn", "x.py"], [sys.executable, "-m", "missing"]):
        warm, cold = (run(["-np", "1", *flags, *command], tmp_path) for flags in FLAGS)
        assert warm.returncode == cold.returncode != 0
        assert warm.stdout == cold.stdout
        said = [line for line in warm.stderr.splitlines() if "in spite of --preload" not in line]
        assert without_pids("\n".join(said)) == without_pids(cold.stderr.rstrip())


def test_a_name_that_is_no_module_is_refused(tmp_path: Path) -> None:
    done = run(["-np", "1", "--preload", "tensor-flow", sys.executable, "-c", ""], tmp_path)
    assert done.returncode == 2
    assert "it must be names of Python modules, separated by commas" in done.stderr


def test_ranks_end_with_their_launcher_and_outlive_their_fork_server(tmp_path: Path) -> None:
    code = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    started = Started(["-np", "2", "--preload", "psutil", sys.executable, "-c", code], tmp_path)
    started.wait_for("pid", 2)
    ranks = [rank for rank in below(started.process.pid, "print('pid'") if rank.cmdline()[1:2] == ["-c"]]
    (server,) = below(started.process.pid, "order")
    assert len({rank.ppid() for rank in ranks}) == 1, "the agent"
    server.kill()
    time.sleep(1.0)
    assert len(ranks) == 2
    assert all(rank.is_running() for rank in ranks)
    started.process.kill()
    started.finish()
    assert not started.orphans
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_an_interrupt_during_the_imports_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    started = Started(["-np", "2", "--preload", "slow", sys.executable, "-c", "print('runs')"], tmp_path)
    while not below(started.process.pid, "order"):
        time.sleep(0.05)
    started.process.send_signal(signal.SIGTERM)
    done = started.finish()
    assert done.returncode == 128 + signal.SIGTERM
    assert not started.orphans
    assert "runs" not in done.stdout


def test_a_fork_server_that_is_killed_during_the_imports_is_named(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = run(["-np", "2", "--preload", "dies", sys.executable, "-c", "print('runs')"], tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "the process that imports the modules of --preload was killed by signal 9" in done.stderr


@pytest.mark.parametrize(("source", "deadlines", "text"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {"HVKERAS_LIVENESS_TIMEOUT": "2"},
     f"in spite of --preload: the fork server on {socket.gethostname()} was stopped for 2 s, and was killed"),
    ("import time; time.sleep(600)", {"HVKERAS_START_TIMEOUT": "5"},
     f"the fork server on {socket.gethostname()} did not answer for 5 s (HVKERAS_START_TIMEOUT), and was killed"),
], ids=["stopped", "hanging"])
def test_a_fork_server_that_is_silent_is_killed_and_ranks_are_new_processes(
        source: str, deadlines: dict[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(source)
    done = run(["-np", "2", "--preload", "silent", sys.executable, "-c", "print('ran')"], tmp_path, deadlines)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] ran", "[1] ran"]
    assert [line for line in done.stderr.splitlines() if text in re.sub(r" \(pid \d+\)", "", line)] == [
        done.stderr.splitlines()[0]], done.stderr


class AgentOfTest:
    """An agent, as the launcher starts it on this host."""

    def __init__(self, patience: float) -> None:
        source = AGENT.read_bytes()
        self._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", BOOT, str(patience)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(str(len(source)).encode() + b"\n" + source)
        assert self.next("hello")["pid"] > 0

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def start(self, worker: int, folder: Path) -> None:
        command = [sys.executable, "-c", "import os; os.write(1, b'ran'); os._exit(3)"]
        preload, _ = preload_of(command, Settings({"HVKERAS_PRELOAD": "psutil"}), str(folder))
        order = {"folder": str(folder), "environment": {}, "preload": preload, "workers": [
            {"worker": worker, "command": command, "environment": {}, "terminal": None}]}
        self._send(json.dumps(order).encode() + b"\n")

    def next(self, kind: str) -> dict[str, Any]:
        """Return the next event of a kind."""
        assert self._process.stdout is not None
        while (event := json.loads(self._process.stdout.readline()))["type"] != kind:
            pass
        return dict(event)

    def servers(self) -> list[psutil.Process]:
        return below(self._process.pid, "order")

    def end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait(60)


def test_a_fork_server_that_is_stopped_later_is_killed_when_a_rank_is_needed(tmp_path: Path) -> None:
    agent = AgentOfTest(1.0)
    try:
        agent.start(0, tmp_path)
        assert agent.next("started")["cold"] == ""
        assert agent.next("exit") == {"type": "exit", "worker": 0, "code": 3}
        (server,) = agent.servers()
        server.suspend()
        for worker in (1, 2):
            agent.start(worker, tmp_path)
            started = agent.next("started")
            assert started["worker"] == worker
            assert started["cold"] == (f"the fork server on {socket.gethostname()} (pid {server.pid}) was stopped for"
                                       " 1 s, and was killed")
            assert base64.b64decode(agent.next("output")["data"]) == b"ran"
            assert agent.next("exit") == {"type": "exit", "worker": worker, "code": 3}
        assert not agent.servers()
    finally:
        assert agent.end() == 0


@pytest.mark.slow
def test_a_terminal_is_that_of_rank_0(tmp_path: Path) -> None:
    """On a terminal, rank 0 has one as well, and its lines appear at once."""
    code = ("import sys; sys.stdout.write("
            "f'{sys.stdout.isatty()} {sys.stdout.line_buffering} {sys.stderr.isatty()}\\n')")
    outputs = []
    for flags in FLAGS:
        command = [str(Path(sys.executable).parent / "hvkeras"), "run", "-np", "2", *flags, sys.executable, "-c", code]
        done = subprocess.run(["script", "-qec", subprocess.list2cmdline(command), "/dev/null"], cwd=tmp_path,
                              capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout
        outputs.append([line.split("\r")[-1] for line in re.split(r"\r?\n", done.stdout) if "] " in line])
    warm, cold = (sorted(line.removeprefix("\x1b[K") for line in lines) for lines in outputs)
    assert warm == cold == ["[0] True False False", "[1] False False False"]


def test_a_shared_fork_server_serves_several_jobs_and_ends_with_its_owner(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("import platform\nplatform.processor()\n")  # starts a program of the PATH
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    code = "import os, sys, counted; print(os.getppid(), flush=True); sys.exit(3 if len(sys.argv) > 1 else 0)"
    with contextlib.closing(SharedForkServer([sys.executable], ["counted"], environment, ())) as server:
        prefix = server.stand_in
        folder = Path(prefix[-2]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        parents = set()
        for arguments, code_of_exit, path in (([], 0, os.environ["PATH"]), (["x"], 3, "/usr/bin:/bin")):
            done = subprocess.run([*prefix, sys.executable, "-c", code, *arguments], cwd=tmp_path,
                                  env={**environment, "PATH": path}, capture_output=True, text=True, timeout=60)
            assert done.returncode == code_of_exit, done.stderr
            parents.add(int(done.stdout))
        assert len(parents) == 1
        sleeps = "import time; print('up', flush=True); time.sleep(600)"
        endless = subprocess.Popen([*prefix, sys.executable, "-c", sleeps], cwd=tmp_path, env=environment,
                                   stdout=subprocess.PIPE)
        assert endless.stdout is not None
        assert endless.stdout.readline() == b"up\n"
    assert endless.wait(timeout=60) != 0, "its rank has ended with the server"
    endless.stdout.close()
    assert not folder.exists()
    assert not psutil.pid_exists(parents.pop())
    done = subprocess.run([*prefix, sys.executable, "-c", "print('by itself')"], capture_output=True, text=True,
                          timeout=60)
    assert done.stdout == "by itself\n", "without a server, the stand-in becomes the rank"


def test_a_shared_fork_server_that_is_stopped_is_killed_and_ranks_are_new_processes(tmp_path: Path) -> None:
    others = psutil.Process().children()
    with contextlib.closing(SharedForkServer([sys.executable], ["psutil"], os.environ, ())) as server:
        *prefix, address, _ = server.stand_in
        (process,) = (child for child in psutil.Process().children() if child not in others)
        sleeps = "import time; print('up', flush=True); time.sleep(600)"
        endless = subprocess.Popen([*prefix, address, "60", sys.executable, "-c", sleeps], cwd=tmp_path,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert endless.stdout is not None and endless.stdout.readline() == "up\n"
        (rank,) = process.children()
        process.suspend()
        done = subprocess.run([*prefix, address, "1", sys.executable, "-c", "print('by itself')"], cwd=tmp_path,
                              capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "by itself\n")
        assert done.stderr == ("hvkeras: this rank is started as a new Python process: its fork server (pid"
                               f" {process.pid}) did not answer for 1 s, and was killed\n")
        assert endless.communicate(timeout=60) == ("", "hvkeras: the fork server of this rank has ended\n")
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "it ends with its server"
        with pytest.raises(MachineError, match=r"must not end before them\. Received: exit_code=-9"):
            _ = server.stand_in


def test_a_shared_fork_server_whose_imports_take_too_long_is_named() -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    with contextlib.closing(SharedForkServer(sleeps, [], {**os.environ, "HVKERAS_START_TIMEOUT": "1"}, ())) as server, \
            pytest.raises(MachineError, match=r"imports .* must end within 1 s.*HVKERAS_START_TIMEOUT.*--no-preload"):
        _ = server.stand_in


def test_a_shared_fork_server_whose_imports_fail_says_why() -> None:
    server = SharedForkServer([sys.executable], ["missing_module"], os.environ, ())
    try:
        with pytest.raises(MachineError, match=r"must be importable.*No module named .*missing_module.*--no-preload"):
            _ = server.stand_in
    finally:
        server.close()


ELASTIC = """import os, signal, sys, time
import hvkeras as hvd, keras, numpy as np
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
state = hvd.elastic.TensorFlowKerasState(model, epoch=0)

class Loses(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and hvd.rank() == 1 and not os.path.exists("lost"):
            open("lost", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)

@hvd.elastic.run
def train(state):
    model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, epochs=15, initial_epoch=state.epoch, verbose=0,
              callbacks=[Loses(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

train(state)
print("trained", state.epoch, hvd.size(), flush=True)
"""


def test_a_lost_rank_is_replaced_by_a_forked_one(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("import os\nwith open('imports', 'a') as file:\n"
                                         "    file.write(f'{os.getpid()}\\n')\n")
    (tmp_path / "train.py").write_text("import counted\n" + ELASTIC)
    done = run(["-np", "2", "--min-np", "1", "--preload", "tensorflow,keras,counted", sys.executable, "train.py"],
               tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line[4:] for line in done.stdout.splitlines()) == ["trained 15 2"] * 2
    assert len((tmp_path / "imports").read_text().split()) == 1
