"""`hvkeras compare`: unmodified scripts on two backends and on one process, and scripts that fail."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvkeras as hvd
from hvkeras.diagnostics.record import WEIGHTS, Record
from launch.hvkeras_run import Started, run
from launch.notebook import outputs

WORKERS = Path(__file__).parent / "workers"
DEADLINE = 300.0  # seconds for a comparison: three jobs of a script that imports TensorFlow
ROWS = [8.0, 8.0, 8.0, 8.0, 5.0] * 4  # rows of the steps of both workers, on every rank


def compare(arguments: Sequence[str], folder: Path, charts: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `hvkeras compare` to its end, by default without matplotlib. Fail the test if it leaves processes."""
    return run(["-np", "2", "--out", "out", *arguments], folder, {"PYTHONPATH": ""} if charts else {},
               command="compare", deadline=DEADLINE)


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Return the cells of each row of the table, by name."""
    found: dict[str, list[str]] = {}
    for line in done.stdout.replace("one process", "one-process").splitlines():
        if line.split()[:1] in (["horovod"], ["tfdist"], ["local"], ["one-process"]):
            found.setdefault(line.split()[0], line.split()[1:])  # not the sentences below the table
    return found


def check_records(folder: Path, name: str, ranks: int) -> None:
    """Assert that each step of each rank is recorded once, with its samples."""
    for rank in range(ranks):
        record = Record.read(folder / "out" / name / "record", rank)
        assert record is not None
        assert (record.rank, record.size) == (rank, ranks)
        assert np.diff(record.stamps[:, 1], prepend=0).tolist() == ROWS
        assert (np.diff(record.stamps[:, 0]) > 0).all()
    assert not (folder / "out" / name / "record" / WEIGHTS).exists()


def test_flags_behind_the_command_are_an_error_unless_they_are_meant(tmp_path: Path) -> None:
    done = compare([sys.executable, "train.py", "--epochs", "3", "--repeat=2", "-np", "4"], tmp_path)
    assert done.returncode == 2
    assert "Received: after_the_command='--repeat -np'.\nHINT: write them before" in done.stderr
    done = compare(["-np", "1", "--", sys.executable, "train.py", "--repeat=2", "-np", "4"], tmp_path)
    assert done.returncode == 2 and "At least two processes" in done.stderr  # the flags are valid
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_script_with_fit_is_compared_on_two_backends(tmp_path: Path) -> None:
    done = compare(["--backends", "horovod,tfdist", sys.executable, str(WORKERS / "compared_fit.py")], tmp_path,
                   charts=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no progress without a terminal
    found = rows(done)
    assert list(found) == ["horovod", "tfdist", "one-process"]
    for name, ranks in (("horovod", 2), ("tfdist", 2), ("one-process", 1)):
        check_records(tmp_path, name, ranks)
        printed = (tmp_path / "out" / name / "rank.0" / "stdout").read_text()
        known = json.loads(printed.partition("known ")[2])
        step, quartiles, samples, share, accuracy, loss, difference = found[name]
        assert float(step.replace(",", "")) > 0 and quartiles.startswith("(")
        assert float(samples.replace(",", "")) > 0 and share.endswith("%")
        assert (accuracy, loss) == (f"{known['accuracy']:.4f}", f"{known['loss']:.4g}")
        assert difference == "-" if name != "tfdist" else float(difference) < 1e-5
    assert found["one-process"][3] == "100%"
    assert "accuracy, loss: from evaluate()" in done.stdout
    assert "compiling of the optimizer's update, not a part of any step: horovod" in " ".join(done.stdout.split())
    assert f"output of all ranks: {tmp_path / 'out'}" in done.stdout
    check_report(tmp_path / "out", found)


def check_report(out: Path, found: dict[str, list[str]]) -> None:
    """Assert that the files in the output folder agree with the table."""
    written = json.loads((out / "results.json").read_text())
    assert (written["schema"], written["processes"], written["reference"]) == (1, 2, "horovod")
    text = unescape((out / "report.html").read_text())
    assert all(sentence in text for sentence in written["sentences"])
    assert written["sentences"][1].startswith("The results agree: ")
    assert text.count("<svg role=\"img\"") == 4
    assert {path.name for path in out.glob("*.png")} == {"step_times.png", "time_split.png", "scaling.png", "loss.png"}
    for row in written["rows"]:
        step, _, samples, share, accuracy, loss, _ = found[row["backend"].replace(" ", "-")]
        assert float(step.replace(",", "")) == pytest.approx(row["step_ms"], rel=0.05)
        assert float(samples.replace(",", "")) == pytest.approx(row["samples_per_s"], rel=0.05)
        assert share == f"{row['scaling_efficiency']:.0%}"
        assert (accuracy, loss) == (f"{row['accuracy']:.4f}", f"{row['loss']:.4g}")
        assert row["peak_memory_bytes"] > 10**8 and row["metrics"]["accuracy"] == row["accuracy"]
        assert row["bytes_per_step"] == (None if row["processes"] == 1 else 4 * (4 * 8 + 8 + 8 * 2 + 2))  # the weights
        assert row["compute_ms"] > 0 and row["communication_ms"] >= 0
    assert all(run["compile_seconds"] > 0 for run in written["runs"])


FOR_ONE_PROCESS = """
import keras
import numpy as np

x = np.random.rand(148, 4).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x.sum(axis=1), batch_size=37, epochs=4, verbose=0)
print("loss:", model.evaluate(x, x.sum(axis=1), verbose=0))
"""


@pytest.mark.slow
def test_a_script_for_one_process_is_compared_with_itself(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(FOR_ONE_PROCESS)
    done = compare(["--data-parallel", "--backends", "native,tfdist", sys.executable, "plain.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["data_parallel"] and " on 2 processes" in done.stdout and "speed-up" in done.stdout
    assert [(row["backend"], row["steps_timed"]) for row in written["rows"]] == [
        ("native", 10), ("tfdist", 10), ("one process", 10)]
    single = written["rows"][-1]
    for row in written["rows"]:
        assert row["samples_per_s"] == pytest.approx(1000 * 37 / row["step_ms"])  # those of all ranks together
        assert row["speed_up"] == pytest.approx(single["step_ms"] / row["step_ms"])
        assert row["scaling_efficiency"] == pytest.approx(row["speed_up"] / row["processes"])
        assert row["loss"] == pytest.approx(single["loss"], rel=1e-4)  # on data that the script does not seed
    for name, shares in (("native", [19, 18]), ("tfdist", [19, 18]), ("one-process", [37])):
        for rank, samples in enumerate(shares):
            record = Record.read(tmp_path / "out" / name / "record", rank)
            assert record is not None
            assert np.diff(record.stamps[:, 1], prepend=0).tolist() == [samples] * 16
    assert (tmp_path / "out" / "native" / "stdout").read_text().count("loss:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--no-preload"]])
def test_a_script_that_cannot_be_forked_runs_in_new_processes(flags: list[str], tmp_path: Path) -> None:
    script = (WORKERS / "compared_fit.py").read_text().replace(
        "from __future__ import annotations\n", "from __future__ import annotations\nimport os\n"
        "os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\n")
    assert "TF_ENABLE" in script
    (tmp_path / "train.py").write_text(script)
    done = compare(["--backends", "native", *flags, sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stderr.split())  # lines are wrapped
    assert said.count("starts each rank as a new Python process") == (0 if flags else 1)
    assert flags or "TF_ENABLE_ONEDNN_OPTS='0'" in said


@pytest.mark.nightly
def test_rounds_and_sizes_give_spreads_and_a_table_of_sizes(tmp_path: Path) -> None:
    done = compare(["-np", "2,3", "--repeat", "2", "--backends", "native", "--verbose", "--no-baseline",
                    sys.executable, str(WORKERS / "compared_fit.py")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    headings = [line for line in done.stderr.splitlines() if line.startswith("[") and "/4] " in line]
    assert headings == ["[1/4] native on 2, round 1 of 2", "[2/4] native on 3, round 1 of 2",
                        "[3/4] native on 2, round 2 of 2", "[4/4] native on 3, round 2 of 2"]
    table = [line.split() for line in done.stdout.splitlines() if line.startswith(("native", "(share)"))]
    assert [len(line) for line in table] == [8, 4, 3] and table[1] == ["(share)", "on", "2", "3"]
    assert "one process" not in done.stdout and "no charts, as matplotlib cannot be imported" in done.stdout
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (written["sizes"], written["processes"], written["repeat"]) == ([2, 3], 3, 2)
    assert [(row["backend"], row["processes"], row["runs"]) for row in written["rows"]] == [
        ("native", 2, 2), ("native", 3, 2)]
    assert all(row["spread"] >= 0 and row["steps_timed"] == 2 * 14 for row in written["rows"])
    assert [row["weight_difference"] for row in written["rows"]] == [0.0, 0.0]  # the script is deterministic
    for part in ("native/np-2/run-1", "native/np-3/run-2"):
        assert Record.read(tmp_path / "out" / part / "record", 0) is not None
    assert not list((tmp_path / "out").rglob(WEIGHTS))


TRAIN = """
import hvkeras as hvd

def train(rate):
    import keras
    import numpy
    import hvkeras as hvd
    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
    model.fit(numpy.ones((120, 4)), numpy.ones((120, 1)), batch_size=8, verbose=0)
"""


def test_a_notebook_keeps_one_output_of_a_comparison_that_moves(tmp_path: Path) -> None:
    wait = "result = hvd.compare(wait, backends='native,tfdist', baseline=False, out='out')"
    code = "import time\nimport hvkeras as hvd\ndef wait():\n    hvd.init()\n    time.sleep(1.2)"
    _, [[progress], changes], [later, _], [[table, shown], _] = outputs(
        tmp_path, code, wait, "time.sleep(0.5)", "print(result.table())\nresult")
    assert progress["kind"] == "display_data"
    assert [re.sub(r"\d+:\d\d", "", line) for line in progress["data"]["text/plain"].splitlines()] == [
        "[1/2] native  ", "[2/2] tfdist  "]
    assert changes > 3, "it moves"
    assert not later, "nothing moves when it is over"
    assert table["data"].startswith("wait(), on 2 processes") and "no training step was seen" in table["data"]
    assert shown["data"]["text/plain"] + "\n" == table["data"] and "wait()" in shown["data"]["text/html"]


@pytest.mark.nightly
def test_a_function_is_compared_in_a_notebook(tmp_path: Path) -> None:
    _, [[progress, shown], changes] = outputs(
        tmp_path, TRAIN, "hvd.compare(train, (0.01,), backends='native', baseline=False, out='out')")
    assert progress["data"]["text/plain"].startswith("[1/1] native  0:") and changes > 1
    assert shown["data"]["text/html"].count("<svg role=") == 3  # no scaling without a baseline
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (row["backend"], row["failure"], row["steps_timed"], row["scaling_efficiency"]) == ("native", "", 9, None)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html", "results.json", "native", "step_times.png", "time_split.png", "loss.png"}


@pytest.mark.parametrize(("options", "words"), [
    ({"np": 1}, "At least two processes are needed for a comparison with one"), ({"repeat": 0}, "must be positive"),
    ({"np": [2, 0]}, "must be positive"), ({"backends": ["tfidst"]}, "Received: backend='tfidst'"),
    ({"np": []}, "At least two processes"), ({"np": "2"}, "must be positive"), ({"repeat": "3"}, "must be positive"),
])
def test_a_wrong_call_is_reported_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(hvd.UsageError, match=words):
        hvd.compare(print, **options)


def test_a_loop_of_ones_own_is_compared_beside_a_backend_that_cannot_serve(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKERS / "compared_loop.py")]
    done = compare(["--backends", "local,tfdist", "--", *command], tmp_path)
    assert done.returncode == 1
    found = rows(done)
    assert found["local"] == ["failed", "(1)"]
    assert "(1) local serves one process and hvkeras run started 2" in done.stdout
    for name, ranks in (("tfdist", 2), ("one-process", 1)):
        check_records(tmp_path, name, ranks)
        printed = float((tmp_path / "out" / name / "rank.0" / "stdout").read_text().split()[1].rstrip(","))
        assert found[name][4:] == ["0.8750", f"{printed:.4g}", "-"]
    assert "accuracy, loss: from what rank 0 printed last" in done.stdout


def test_failures_are_rows_with_their_reasons(tmp_path: Path) -> None:
    code = """
import os, sys
if os.environ["HVKERAS_BACKEND"] == "tfdist":
    raise ValueError("the sky is falling")
import hvkeras as hvd
hvd.init()
"""
    done = compare(["--backends", "tfdist,horovod", "--repeat", "2", sys.executable, "-c", code], tmp_path)
    assert done.returncode == 1
    assert {path.name for path in (tmp_path / "out").glob("*/run-*")} == {"run-1"}  # failed runs are not repeated
    assert rows(done) == {"tfdist": ["failed", "(1)"], "horovod": ["failed", "(2)"], "one-process": ["failed", "(2)"]}
    lines = done.stdout.splitlines()
    reason = next(line for line in lines if line.startswith("(1) "))
    assert reason.startswith("(1) rank ") and reason.endswith("failed with ValueError: the sky is falling")
    assert any(line.startswith("(2) no training step was seen: the script needs hvd.Distributed") for line in lines)
    assert done.stderr.splitlines()[0:2] == ["", "the standard error of tfdist ends with"]
    assert done.stderr.splitlines()[-1] == "ValueError: the sky is falling"
    assert "horovod" not in done.stderr


def test_a_script_without_hvkeras_is_not_run_on_each_backend(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("open('runs', 'a').write('x')\n")
    done = compare(["--backends", "tfdist,horovod", sys.executable, "plain.py"], tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    first, *lines = done.stderr.splitlines()
    last = " ".join(lines)
    assert first.startswith("hvkeras compare: plain.py names neither hvkeras nor horovod.")
    assert last.startswith("hvkeras compare: The script must call hvd.init(), and --out must be a folder that all hosts"
                           " share: rank 0 of the first run left no record. HINT: add import hvkeras")
    assert "--data-parallel" in last
    assert (tmp_path / "runs").read_text() == "xx", "the two ranks of the first run"


def test_a_run_that_takes_too_long_is_ended_and_is_a_row(tmp_path: Path) -> None:
    code = """
import os, time
import hvkeras as hvd
if os.environ["HVKERAS_BACKEND"] == "tfdist":
    time.sleep(1000)
hvd.init()
"""
    done = compare(["--backends", "tfdist", "--timeout", "2", sys.executable, "-c", code], tmp_path)
    assert done.returncode == 1
    assert rows(done)["tfdist"] == ["failed", "(1)"]
    assert "(1) it was terminated after a timeout of 2 s: raise --timeout" in done.stdout


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)], ids=["Ctrl-C", "SIGTERM"])
def test_a_comparison_that_is_ended_leaves_no_orphan(number: int, code: int, tmp_path: Path) -> None:
    script = "import time; print('ready', flush=True); time.sleep(1000)"
    started = Started(["-np", "2", "--backends", "tfdist", "--verbose", sys.executable, "-c", script], tmp_path,
                      command="compare")
    started.wait_for("ready", 2)
    started.process.send_signal(number)
    done = started.finish()
    assert done.returncode == code
    assert not started.orphans, done.stderr
    assert "step, ms" not in done.stdout
