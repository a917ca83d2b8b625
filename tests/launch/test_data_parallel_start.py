"""Start of scripts for one process on several ranks: their environment, output and files."""

from __future__ import annotations

import http.server
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.launchers import BIN, clean_environment
from launch.data_parallel_scripts import MPIRUN
from launch.hvkeras_run import Started, run

ONE_PROCESS = Path(__file__).parent / "workers" / "one_process.py"

START = """
import json, os, random, subprocess, sys
import numpy as np

def told():
    return [random.random(), hash("a"), np.random.rand()]

if len(sys.argv) > 1:
    code = "import random, sys; print(random.random(), 'wrapt' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    # In one write, as mpirun may mix those of its ranks.
    sys.stderr.write(json.dumps({"told": told(), "child": child, "listed": os.listdir(), "argv": sys.argv[1:],
                      "pid": os.environ.get("HVKERAS_DATA_PARALLEL_PROCESS") == str(os.getpid())}) + "\\n")
print("once")
"""

FILES = """
import os, shutil, sys, zipfile
import numpy as np

for number in range(2):
    os.makedirs(f"out{number}/deep")
    with open("log.txt", "a") as file:
        file.write(f"{number}\\n")
    np.save("array.npy", np.arange(3))
    with zipfile.ZipFile("pack.zip", "w") as pack:
        pack.write("files.py")
    with zipfile.ZipFile("pack.zip") as pack:
        pack.extractall(f"out{number}/deep")
    os.rename(f"out{number}/deep/files.py", "renamed.py")
    shutil.copytree("data", f"copy{number}")
    shutil.rmtree("gone", ignore_errors=True)
    with open("data/settings.txt", "w") as file:
        file.write("changed\\n")
assert open("log.txt").read() == "before\\n0\\n1\\n"
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working folder of a script; temporary files are in a folder next to it."""
    (tmp_path / "temporary").mkdir()
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    (folder / "gone").mkdir()
    (folder / "data" / "settings.txt").write_text("before\n")
    (folder / "log.txt").write_text("before\n")
    (folder / "start.py").write_text(START)
    (folder / "files.py").write_text(FILES)
    return folder


def started(arguments: list[str], work: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(["--data-parallel", *arguments], work, {"TMPDIR": str(work.parent / "temporary"), **variables})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.suffix not in (".zip", ".pyc")}


def by_rank(stderr: str) -> dict[str, Any]:
    """Return what each rank has written as JSON."""
    lines = [line for line in stderr.splitlines() if "{" in line]
    return {line.partition("{")[0].strip(): json.loads(line[line.index("{"):]) for line in lines}


def test_ranks_start_alike_and_speak_with_one_voice(work: Path) -> None:
    done = started(["-np", "3", "bash", "-c", f"{sys.executable} start.py -x 'a b' && {sys.executable} start.py"], work)
    assert (done.returncode, done.stdout) == (0, "once\nonce\n")
    found = by_rank(done.stderr)
    children = [each.pop("child") for each in found.values()]
    assert sorted(found) == ["", "[1]", "[2]"]
    assert found[""] == found["[1]"] == found["[2]"]
    assert (found[""]["argv"], found[""]["pid"]) == (["-x", "a b"], True)
    assert len({number for number, _ in children}) == 3
    assert {hooked for _, hooked in children} == {"False"}
    assert done.stderr.count("hvkeras run: no rank has imported TensorFlow") == 1
    again = by_rank(started(["-np", "2", sys.executable, "start.py", "-x"], work).stderr)
    assert again[""]["told"] == again["[1]"]["told"] != found[""]["told"]
    assert again[""]["listed"] == again["[1]"]["listed"]


def test_the_script_writes_the_files_of_one_process(work: Path) -> None:
    alone = shutil.copytree(work, work.with_name("alone"))
    done = started(["-np", "3", sys.executable, "files.py"], work)
    assert done.returncode == 0, done.stderr
    subprocess.run([sys.executable, "files.py"], cwd=alone, check=True, timeout=60)
    assert tree(work) == tree(alone)
    assert os.listdir(work.parent / "temporary") == []


def test_without_private_folders_ranks_meet(work: Path) -> None:
    done = started(["--no-private-folders", "-np", "2", sys.executable, "files.py"], work)
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr


def test_the_error_of_a_rank_and_its_exit_code_arrive(work: Path) -> None:
    (work / "fails.py").write_text("import os, time\nif os.environ['HVKERAS_RUN_RANK'] == '1':\n"
                                   "    open('mine', 'w')\n    1 / 0\ntime.sleep(100)\n")
    done = started(["-np", "2", sys.executable, "fails.py"], work)
    assert done.returncode == 1
    assert re.match(r"hvkeras run: rank 1 on \S+ \(pid \d+\) failed\nTraceback", done.stderr)
    assert done.stderr.endswith("\nZeroDivisionError: division by zero\n")
    assert not (work / "mine").exists()
    assert os.listdir(work.parent / "temporary") == []
    assert started(["-np", "2", sys.executable, "-c", "import sys; sys.exit(7)"], work).returncode == 7
    assert started(["-np", "2", "nowhere"], work).returncode == 127


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
def test_a_script_for_horovod_is_refused(work: Path) -> None:
    done = started(["-np", "2", sys.executable, "-c", "import horovod.tensorflow as hvd; hvd.init()"], work)
    assert done.returncode == 1
    assert "scripts that are written for one process. Received: imports='horovod'.\nHINT: run a script" in done.stderr
    trains = "import keras; keras.ops.ones(1)"
    assert started(["-np", "2", "--backend", "horovod", sys.executable, "-c", trains], work).returncode == 0


def test_what_a_killed_job_leaves_is_removed_by_the_next_one(work: Path) -> None:
    temporary = work.parent / "temporary"
    sleeping = [sys.executable, "-c", "import time; print('sleeps', flush=True); time.sleep(100)"]
    job = Started(["--data-parallel", "-np", "2", *sleeping], work, {"TMPDIR": str(temporary)})
    job.wait_for("sleeps")
    job.process.send_signal(signal.SIGKILL)
    job.finish()
    assert [path.name for path in temporary.glob("hvkeras-private-*/*.owner")] != []
    assert started(["-np", "2", "true"], work).returncode == 0
    assert os.listdir(temporary) == []
    assert tree(work)["log.txt"] == b"before\n"


def test_one_rank_is_the_script_itself(work: Path) -> None:
    code = "import os; print([name for name in os.environ if 'DATA_PARALLEL' in name], 'hooks' in os.environ)"
    done = started(["-np", "1", sys.executable, "-c", code], work)
    assert (done.stdout, done.stderr) == ("[] False\n", "")


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--as-horovod"], "--data-parallel is for scripts that are written for one process"),
    (["--tf-config"], "--data-parallel is for scripts that are written for one process"),
    (["--min-np", "2"], "The ranks of a job with --data-parallel are fixed"),
])
def test_ways_to_train_exclude_each_other(work: Path, arguments: list[str], sentence: str) -> None:
    done = started([*arguments, "-np", "2", "true"], work)
    assert (done.returncode, done.stderr.startswith(f"hvkeras run: {sentence}")) == (2, True)


def test_there_is_no_standard_input(work: Path) -> None:
    done = started(["-np", "2", sys.executable, "-c", "input()"], work)
    assert "EOFError: Ranks have no standard input under --data-parallel." in done.stderr


@pytest.mark.slow
def test_other_backends_of_keras_are_refused(work: Path) -> None:
    script = "import os; os.environ['KERAS_BACKEND'] = 'jax'; import keras"
    jax = started(["-np", "2", sys.executable, "-c", script], work)
    assert "--data-parallel trains with the backend tensorflow of Keras. Received: backend='jax'." in jax.stderr


@pytest.mark.slow
def test_one_python_process_of_each_rank_trains(work: Path) -> None:
    (work / "train.py").write_text("import keras, multiprocessing, sys\n"
                                   "print('trains', 'hvkeras.global_batch.mode' in sys.modules, flush=True)\n")
    (work / "starts.py").write_text("import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)")
    twice = f"{sys.executable} train.py && {sys.executable} starts.py && {sys.executable} train.py"
    done = started(["-np", "2", "bash", "-c", twice], work)
    assert (done.returncode, done.stdout) == (1, "trains True\ntrains False\n")
    assert "Only one Python process of each rank can import TensorFlow under --data-parallel." in done.stderr


def test_mpirun_starts_it_by_a_command(work: Path) -> None:
    environment = clean_environment(work.parent) | {"TMPDIR": str(work.parent / "temporary")}
    command = [*MPIRUN, "-np", "2", str(BIN / "hvkeras"), "exec", "--data-parallel"]
    done = subprocess.run([*command, "start.py", "-x"], cwd=work, env=environment, capture_output=True, text=True,
                          timeout=60, check=True)
    assert done.stdout == "once\n"
    first, second = (json.loads(line) for line in done.stderr.splitlines() if line.startswith("{"))
    assert first["told"] == second["told"]
    subprocess.run([*command, "--", sys.executable, "files.py"], cwd=work, env=environment, timeout=60, check=True)
    assert (work / "renamed.py").exists()
    place = work.parent / "temporary" / f"hvkeras-private-{os.geteuid()}"
    assert not place.exists()
    place.mkdir()
    place.chmod(0o755)
    refused = subprocess.run([*command, "start.py"], cwd=work, env=environment, capture_output=True, text=True,
                             timeout=60, check=False)
    assert refused.returncode == 1
    assert "private folders must belong to you alone, but its mode is 0755" in refused.stderr


@pytest.fixture
def downloads() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server, and the requests that it has received."""
    packed, requests = io.BytesIO(), []
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a/x", "1")
        archive.writestr("y", "2")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(packed.getvalue())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()
        thread.join()


def test_keras_writes_and_downloads_once(work: Path, tmp_path: Path, downloads: tuple[str, list[str]]) -> None:
    url, requests = downloads
    arguments = [str(ONE_PROCESS), str(tmp_path / "found"), str(tmp_path / "elsewhere"), url]
    done = started(["-np", "2", sys.executable, *arguments], work)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2))
    assert first == second
    assert (first["log"], first[str(tmp_path / "elsewhere" / "cache")], first["cache"]) == (3, ["a", "y"], ["a", "y"])
    assert len(first["errors"]) == 2
    assert requests == ["/archive.zip"] * 2
    assert done.stdout.count("the end") == 1
    assert {"out/1.keras", "out/2.keras", "model.keras", "exported/saved_model.pb"} <= set(first["seen"])
    assert set(first["seen"]) <= {str(path.relative_to(work)) for path in work.rglob("*")}
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"log.csv", "best.weights.h5", "model.keras",
                                                                         "cache"}


@pytest.mark.slow
def test_random_numbers_are_those_of_one_process_with_the_same_seeds(work: Path, tmp_path: Path,
                                                                    downloads: tuple[str, list[str]]) -> None:
    arguments = [str(tmp_path / "found"), str(tmp_path / "elsewhere"), downloads[0]]
    alone = ("import random, runpy, sys; random.seed(5); import numpy as np; np.random.seed(5);"
             "import tensorflow as tf; tf.random.set_seed(5); runpy.run_path(sys.argv.pop(1))")
    environment = clean_environment(work.parent) | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    folder = tmp_path / "alone"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", alone, str(ONE_PROCESS), *arguments], cwd=folder, env=environment, check=True,
                   timeout=100)
    done = started(["-np", "2", sys.executable, str(ONE_PROCESS), *arguments], work, PYTHONHASHSEED="5")
    assert done.returncode == 0, done.stderr
    states = [json.loads((tmp_path / f"found.{rank}").read_text())["states"] for rank in ("alone", "0", "1")]
    assert states[0] == states[1]
    assert states[1] == states[2]
