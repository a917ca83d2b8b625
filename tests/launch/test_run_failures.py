"""`hvkeras run` when a rank fails or the launcher is terminated: last line, exit code, and no orphans."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

import hvkeras.launcher.membership
import hvkeras.launcher.restarts
from harness.launchers import BIN, clean_environment
from harness.processes import MARK, end_marked
from hvkeras.control.cause import Cause
from hvkeras.control.server import ControlServer
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.placement import place_ranks
from hvkeras.launcher.printer import Printer
from launch.hvkeras_run import Started, python, run, warm_ranks

FOR_EVER = "time.sleep(1000)"


def test_a_ranks_exit_code_is_kept_and_the_others_end(tmp_path: Path) -> None:
    done = run(["-np", "3", *python(f"sys.exit(7) if rank == 1 else {FOR_EVER}")], tmp_path)
    assert done.returncode == 7
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvkeras run: rank 1 on ")
    assert last.endswith("exited with code 7")


def test_the_first_failing_ranks_traceback_is_last(tmp_path: Path) -> None:
    code = f"""
if rank == 1:
    raise ValueError("the sky is falling")
try:
    {FOR_EVER}
finally:
    print("late words", file=sys.stderr)
"""
    done = run(["-np", "2", *python(code)], tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("hvkeras run: rank 1 on "))
    assert lines[start].endswith(") failed")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines.count("Traceback (most recent call last):") == 1 and "[1] Traceback" not in done.stderr
    assert lines[-1] == "ValueError: the sky is falling"


LONG_ERRORS = """
import tensorflow as tf
import keras
import hvkeras as hvd

hvd.init()


class Layer(keras.layers.Layer):
    def call(self, inputs):
        if hvd.rank() == 1:
            raise ValueError("five columns, please")  # line 12
        return inputs


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        if hvd.rank() == 1:
            raise KeyError("no such entry")  # line 26
        return super().train_step(data)


@tf.function
def loss(predicted, rows):
    return tf.gather(predicted, rows)  # line 32


@tf.function
def step(layer):
    return layer(tf.ones([2, 4]))  # line 37


def fit():
    model = Model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(tf.ones([4, 3]), tf.ones([4, 1]), verbose=0)


{call}
hvd.barrier()
"""


@pytest.mark.parametrize(("call", "reason"), [
    ("step(Layer())", "ValueError: five columns, please, at train.py:12 in call"),
    pytest.param("fit()", "KeyError: 'no such entry', at train.py:26 in train_step", marks=pytest.mark.slow),
    pytest.param("loss(tf.zeros([2]), tf.constant(9 * hvd.rank()))", "InvalidArgumentError: indices = 9 is not"
                 " in [0, 2), at train.py:32 in loss", marks=pytest.mark.slow),
])
def test_last_lines_have_the_reason_and_the_users_line_of_errors_of_many_lines(call: str, reason: str,
                                                                               tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONG_ERRORS.replace("{call}", call))
    done = run(["-np", "2", "--output-filename", "logs", *warm_ranks([sys.executable, "train.py"])], tmp_path)
    assert done.returncode == 1
    survivor, failed = ((tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text().splitlines()[-1] for rank in (0, 1))
    assert survivor.startswith("hvkeras: rank 0 on ") and survivor.endswith(f" failed with {reason}")
    assert failed == done.stderr.splitlines()[-1] == reason


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    code = f"print('my last words', file=sys.stderr)\nos.kill(os.getpid(), 9) if rank == 1 else {FOR_EVER}"
    done = run(["-np", "2", *python(code)], tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines()[-4:-2] == ["hvkeras run: the standard error of rank 1 ends with", "my last words"]
    assert done.stderr.splitlines()[-2].endswith("was killed by SIGKILL.")
    assert done.stderr.splitlines()[-1].startswith("HINT: ")


def test_a_crash_keeps_its_signal(tmp_path: Path) -> None:
    done = run(["-np", "1", *python("import faulthandler; faulthandler._sigsegv()")], tmp_path)
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stderr.splitlines()[-1].endswith("was killed by SIGSEGV")


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_ends_all_the_same(tmp_path: Path) -> None:
    code = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    while not os.path.exists("ready"):
        time.sleep(0.05)
    sys.exit(3)
open("ready", "w").close()
{FOR_EVER}
"""
    assert run(["-np", "2", *python(code)], tmp_path).returncode == 3


def test_the_others_get_sigterm_and_may_clean_up(tmp_path: Path) -> None:
    code = f"""
import signal
def clean_up(number, frame):
    print("cleaned up")
    sys.exit(0)
if rank == 1:
    while not os.path.exists("ready"):
        time.sleep(0.05)
    sys.exit(4)
signal.signal(signal.SIGTERM, clean_up)
open("ready", "w").close()
{FOR_EVER}
"""
    done = run(["-np", "2", *python(code)], tmp_path)
    assert done.returncode == 4
    assert done.stdout == "[0] cleaned up\n"


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    done = run(["-np", "2", "no-such-command"], tmp_path)
    assert done.returncode == 127
    assert "could not be started: The command must start on every host (No such file or directory)" in done.stderr
    assert "Received: command='no-such-command'" in done.stderr


def test_a_command_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("text")
    done = run(["-np", "1", "./script"], tmp_path)
    assert done.returncode == 126
    assert "Permission denied" in done.stderr


FAMILY = """
import subprocess
subprocess.Popen(["sleep", "1000"])                             # in the rank's process group
subprocess.Popen(["sleep", "1000"], start_new_session=True)     # and one that has left it
print("ready")
"""


@pytest.mark.parametrize(("number", "code", "words"), [
    (signal.SIGINT, 130, "the launcher was interrupted (Ctrl-C)"),
    (signal.SIGTERM, 143, "the launcher received SIGTERM"),
    (signal.SIGHUP, 129, "the launcher received SIGHUP"),
    (signal.SIGKILL, -9, ""),
], ids=["Ctrl-C", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_launcher_that_is_ended_leaves_no_orphan(number: int, code: int, words: str, tmp_path: Path) -> None:
    started = Started(["-np", "2", *python(FAMILY + FOR_EVER)], tmp_path)
    started.wait_for("ready", 2)
    deadline = time.monotonic() + 10.0
    while started.living() < 1 + 2 + 2 * 3:  # a starting process has no environment yet, and so no mark
        assert time.monotonic() < deadline
    started.process.send_signal(number)
    done = started.finish()
    assert done.returncode == code
    assert started.orphans == []
    assert words in done.stderr


@pytest.mark.parametrize(("whom", "number", "words"), [
    ("agent", signal.SIGKILL, r"the agent of hvkeras run there, pid \d+, was killed by SIGKILL"),
    ("agent", signal.SIGSTOP, r"the agent of hvkeras run there, pid \d+, was stopped for 1 s, and ended"),
    pytest.param("guard", signal.SIGKILL, "it ended", marks=pytest.mark.nightly),
    pytest.param("both", signal.SIGSTOP, "the agent of hvkeras run there was stopped for 1 s",
                 marks=pytest.mark.nightly),
], ids=["agent killed", "agent stopped", "guard killed", "both stopped"])
def test_an_agent_that_is_killed_or_stopped_takes_its_ranks_along(whom: str, number: int, words: str,
                                                                  tmp_path: Path) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FAMILY}"
    started = Started(["-np", "1", "--output-filename", "logs", *python(f"{code}print(os.getppid())\n{FOR_EVER}")],
                      tmp_path, {"HVKERAS_LIVENESS_TIMEOUT": "1"})
    started.wait_for("ready")
    log = tmp_path / "logs" / "rank.0" / "stdout"
    while log.read_text().count("\n") < 2:
        time.sleep(0.02)
    agent = psutil.Process(int(log.read_text().split()[1]))
    if whom == "both":
        os.killpg(os.getpgid(agent.pid), number)
    else:
        os.kill(agent.pid if whom == "agent" else agent.ppid(), number)
    done = started.finish()
    assert started.orphans == []
    assert done.returncode == 1
    assert re.search(rf"rank 0 on .* was lost with its host \(.*{words}.*\)", done.stderr.splitlines()[-1]), done.stderr


HERE = """
import pathlib, time
def stay():
    pathlib.Path("here").touch()
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["hvd.run", "hvkeras compare"])
def test_a_job_ends_with_the_process_that_started_it_for_itself(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{HERE}\nimport sys, hvkeras as hvd\n"
                                       "hvd.run(stay) if 'call' in sys.argv else stay()\n")
    command = [sys.executable, "train.py"]
    mark = uuid.uuid4().hex
    whole = [*command, "call"] if how == "hvd.run" else [str(BIN / "hvkeras"), "compare", "-np", "2", *command]
    parent = subprocess.Popen(whole, cwd=tmp_path, env=clean_environment(tmp_path) | {MARK: mark},
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (tmp_path / "here").exists():
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert end_marked(mark, grace=20.0) == []


def test_a_second_ctrl_c_ends_ranks_that_ignore_sigterm(tmp_path: Path) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); {FOR_EVER}"
    started = Started(["-np", "2", *python(code)], tmp_path)
    started.wait_for("ready", 2)
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    started.process.send_signal(signal.SIGINT)
    assert started.finish().returncode == 130
    assert started.orphans == []


def test_ctrl_z_stops_the_ranks_and_fg_continues_them(tmp_path: Path) -> None:
    code = """
print("pid", os.getpid())
while not os.path.exists("go"):
    time.sleep(0.02)
"""
    started = Started(["-np", "1", "--output-filename", "logs", *python(code)], tmp_path)
    started.wait_for("pid")
    rank = psutil.Process(int((tmp_path / "logs" / "rank.0" / "stdout").read_text().split()[1]))
    started.process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + 30
    while rank.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    assert rank.status() == psutil.STATUS_STOPPED
    (tmp_path / "go").touch()
    while psutil.Process(started.process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    started.process.send_signal(signal.SIGCONT)
    assert started.finish().returncode == 0


def test_what_a_rank_leaves_behind_ends_with_the_job(tmp_path: Path) -> None:
    assert run(["-np", "2", *python(FAMILY)], tmp_path).returncode == 0


def test_ranks_are_not_interrupted_by_the_launchers_terminal(tmp_path: Path) -> None:
    code = "print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())"
    assert run(["-np", "1", *python(code)], tmp_path).stdout == "[0] True True\n"


@pytest.mark.parametrize(("arguments", "screen", "words"), [
    ("", "/dev/full", r"Standard output must be writable \(No space left on device\)\."),
    ("--output-filename logs", "/dev/null",
     (r"The files of the ranks' output must be writable \(File too large\)\. Received:"
      r" path='\S+/logs/rank\.0/stdout', size=65536, room_left=\d+\.")),
], ids=["screen", "files"])
def test_a_full_disk_is_called_so(arguments: str, screen: str, words: str, tmp_path: Path) -> None:
    write = shlex.join(python("for _ in range(300): print(1000 * 'x')\ntime.sleep(1000)"))
    command = f"ulimit -f 64; exec {BIN}/hvkeras run -np 1 {arguments} {write} > {screen}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=clean_environment(tmp_path), text=True,
                          stderr=subprocess.PIPE, timeout=100, check=False)
    assert done.returncode == 1
    last = "\n".join(done.stderr.splitlines()[-2:])
    assert re.fullmatch(f"hvkeras run: {words}\nHINT: free space, .*", last), done.stderr


def test_a_closed_pipe_ends_the_job(tmp_path: Path) -> None:
    started = Started(["-np", "2", *python("while True: print('more'); time.sleep(0.01)")], tmp_path)
    started.wait_for("more")
    assert started.process.stdout is not None
    started.process.stdout.close()
    assert started.process.wait(timeout=60) == 128 + signal.SIGPIPE
    started.process.stdout = None
    started.finish()
    assert started.orphans == []


def test_a_failure_that_the_server_hears_of_last_is_the_jobs_cause(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher passes a failure to the server's thread. If that is late, all ranks have ended before."""
    class Late(ControlServer):
        def fail(self, cause: Cause) -> None:
            self._server.call(time.sleep, 1.0)
            super().fail(cause)

    monkeypatch.setattr(hvkeras.launcher.membership, "ControlServer", Late)
    job = JobSpec([sys.executable, "-c", "import sys; sys.exit('the sky is falling')"], place_ranks(1, None, None),
                  str(tmp_path), clean_environment(tmp_path), reset_limit=1)
    terminal = io.BytesIO()
    assert hvkeras.launcher.restarts.run(job, lambda again, size: Printer(size, terminal, terminal, False)) == 1
    lines = terminal.getvalue().decode().splitlines()
    assert lines[-1].startswith("hvkeras run: rank 0 on ")
    assert lines[-1].endswith("exited with code 1")
    assert lines[-2] == "the sky is falling"
    assert [line for line in lines if "starts all" in line] == [
        "hvkeras run: restarts all ranks, reset 1 of at most 1"]


INIT = "import hvkeras as hvd; hvd.init('tfdist'); print('ready')\n"


def test_the_cause_that_ranks_agree_on_is_reported_last(tmp_path: Path) -> None:
    code = INIT + f"if rank == 1: raise ValueError('the sky is falling')\n{FOR_EVER}"
    done = run(["-np", "2", *warm_ranks(python(code))], tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    sentence = next(line for line in lines if line.startswith("hvkeras run: rank 1 on "))
    assert sentence.endswith(" failed")
    assert lines[lines.index(sentence) + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the sky is falling"
    assert not any(line.startswith(("[0] hvkeras: rank 0 on ", "[1] Traceback")) for line in lines)


def test_a_rank_that_never_calls_init_is_named_immediately(tmp_path: Path) -> None:
    done = run(["-np", "2", "--start-timeout", "100", *warm_ranks(python("if rank == 1: sys.exit(0)\n" + INIT))],
               tmp_path)
    assert done.returncode == 1
    assert "rank 1 on " in done.stderr.splitlines()[-1]
    assert "exited with code 0 and never called hvd.init()" in done.stderr.splitlines()[-1]


def test_an_interrupted_job_says_so_on_every_rank(tmp_path: Path) -> None:
    started = Started(["-np", "2", "--output-filename", "logs", *warm_ranks(python(INIT + FOR_EVER))], tmp_path)
    started.wait_for("ready", 2)
    started.process.send_signal(signal.SIGINT)
    done = started.finish()
    assert done.returncode == 130
    for rank in (0, 1):
        said = (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text()
        assert re.search(rf"hvkeras: rank {rank} on \S+ ends because the launcher was interrupted \(Ctrl-C\)\n", said)
    assert done.stderr.splitlines()[-1] == "hvkeras run: the launcher was interrupted (Ctrl-C)"
    assert not re.search(r"^\[\d\] hvkeras: rank", done.stderr, re.MULTILINE), "the launcher says it for all ranks"
    assert started.orphans == []


def test_python_is_the_same_for_launcher_and_ranks(tmp_path: Path) -> None:
    done = run(["-np", "1", "python", "-c", "import sys; print(sys.prefix)"], tmp_path)
    assert done.stdout == f"[0] {sys.prefix}\n"


def test_sigusr1_has_all_ranks_say_where_they_are(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import time
import keras
import numpy as np
import hvkeras as hvd

class LooksForTheSky(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            print("ready", flush=True)
            time.sleep(1000)

hvd.init("tfdist")
if hvd.rank():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    with hvd.alone():
        model.fit(np.ones((99, 2)), np.ones(99), epochs=2, verbose=0, callbacks=[LooksForTheSky()])
print("ready", flush=True)
hvd.barrier()
""")
    started = Started(["-np", "2", *warm_ranks([sys.executable, str(script)])], tmp_path)
    started.wait_for("ready", 2)
    started.process.send_signal(signal.SIGUSR1)
    assert started.process.stderr is not None
    hook = "on_train_batch_end"
    looking = f"callback LooksForTheSky.{hook}, train step 3 of epoch 1, at script.py:11 in {hook}"
    says = r"\[{}\] hvkeras: rank {} on \S+ \(pid \d+\) (is here|has made no progress for \d+ s): "
    missing = [rf"{says.format(0, 0)}outside of fit, at script.py:20 in <module>; the innermost call last:",
               rf"{says.format(1, 1)}{looking}; the innermost call last:",
               r"\[0\]   script.py:20 in <module>: ", r"\[1\]   script.py:11 in on_train_batch_end: time.sleep\(1000\)"]
    words: list[str] = []
    while missing:
        words.append(started.process.stderr.readline())
        assert words[-1], "".join(words)
        found = [pattern for pattern in missing if re.match(pattern, words[-1])]
        if not found and re.match(says.format(r"\d", r"\d"), words[-1]):
            started.process.send_signal(signal.SIGUSR1)  # a rank that has announced itself was not there yet
        missing = [pattern for pattern in missing if pattern not in found]
    started.process.send_signal(signal.SIGINT)
    assert started.finish().returncode == 130


def test_memory_of_a_rank_that_is_killed_as_it_makes_it_is_removed(tmp_path: Path) -> None:
    code = """
import signal, hvkeras
from hvkeras.backends.native import groups
make = groups._Opening._open_group
def killed(self, name, create):
    make(self, name, create)
    print(name, flush=True)
    if create:
        os.kill(os.getpid(), signal.SIGKILL)
groups._Opening._open_group = killed
hvkeras.init()
"""
    done = run(["-np", "2", "--backend", "native", *warm_ranks(python(code))], tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    names = [line.split("/")[-1] for line in done.stdout.splitlines() if "hvkeras-" in line]
    assert len(names) == 1
    assert not list(Path("/dev/shm").glob(f"{names[0]}*"))


@pytest.mark.slow
def test_memory_of_a_job_of_which_all_is_killed_is_removed_by_the_next_job(tmp_path: Path) -> None:
    code = """
import signal, psutil, hvkeras
from hvkeras.backends.native import groups
make = groups._Opening._open_group
def killed(self, name, create):
    make(self, name, create)
    if create:
        open("name", "w").write(name)
        launcher = [one for one in psutil.Process().parents() if "run" in one.cmdline()][-1]
        for one in [launcher, *launcher.children(recursive=True)]:  # the end of an agent ends this rank as well
            if one.pid != os.getpid():
                one.kill()
        os.kill(os.getpid(), signal.SIGKILL)
groups._Opening._open_group = killed
hvkeras.init()
"""
    assert run(["-np", "2", "--backend", "native", *python(code)], tmp_path).returncode == -signal.SIGKILL
    name = (tmp_path / "name").read_text().strip("/")
    done = run(["-np", "2", "--backend", "native", *warm_ranks(python("import hvkeras; hvkeras.init()"))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(Path("/dev/shm").glob(f"{name}*"))
