"""`hvkeras compare`: unchanged scripts on two backends and on one process, and what becomes of those that fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hvkeras.record import WEIGHTS, Record
from launch.hvkeras_run import Started, run

WORKERS = Path(__file__).parent / "workers"
DEADLINE = 300.0  # seconds for a comparison: three jobs of a script that imports TensorFlow
ROWS = [8.0, 8.0, 8.0, 8.0, 5.0] * 4  # of the steps of both workers, on every rank


def compare(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `hvkeras compare` to its end; leaving a process behind fails the test."""
    return run(["-np", "2", "--out", "out", *arguments], folder, command="compare", deadline=DEADLINE)


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """The table's rows: the cells after the name."""
    text = done.stdout.replace("one process", "one-process")
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()
            if line.split()[:1] in (["horovod"], ["tfdist"], ["local"], ["one-process"])}


def check_records(folder: Path, name: str, ranks: int) -> None:
    """Every step of every rank is there, once, with its samples."""
    for rank in range(ranks):
        record = Record.read(folder / "out" / name / "record", rank)
        assert record is not None
        assert (record.rank, record.size) == (rank, ranks)
        assert np.diff(record.stamps[:, 1], prepend=0).tolist() == ROWS
        assert (np.diff(record.stamps[:, 0]) > 0).all()
    assert not (folder / "out" / name / "record" / WEIGHTS).exists()


def test_a_script_with_fit_is_compared_on_two_backends(tmp_path: Path) -> None:
    done = compare(["--backends", "horovod,tfdist", sys.executable, str(WORKERS / "compared_fit.py")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no terminal, no progress
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
    assert f"output of all ranks: {tmp_path / 'out'}" in done.stdout


def test_a_loop_of_ones_own_is_compared_beside_a_backend_that_cannot_serve(tmp_path: Path) -> None:
    done = compare(["--backends", "local,tfdist", "--", sys.executable, str(WORKERS / "compared_loop.py")], tmp_path)
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
"""
    done = compare(["--backends", "tfdist,horovod", sys.executable, "-c", code], tmp_path)
    assert done.returncode == 1
    assert rows(done) == {"tfdist": ["failed", "(1)"], "horovod": ["failed", "(2)"], "one-process": ["failed", "(2)"]}
    lines = done.stdout.splitlines()
    reason = next(line for line in lines if line.startswith("(1) "))
    assert reason.startswith("(1) rank ") and reason.endswith("exited with code 1: ValueError: the sky is falling")
    assert any(line.startswith("(2) rank 0 left no record: the script must call hvd.init()") for line in lines)
    assert done.stderr.splitlines()[0:2] == ["", "the standard error of tfdist ends with"]
    assert done.stderr.splitlines()[-1] == "ValueError: the sky is falling"
    assert "horovod" not in done.stderr


def test_a_run_that_takes_too_long_is_ended_and_is_a_row(tmp_path: Path) -> None:
    code = "import os, time; time.sleep(1000 if os.environ['HVKERAS_BACKEND'] == 'tfdist' else 0)"
    done = compare(["--backends", "tfdist", "--timeout", "2", sys.executable, "-c", code], tmp_path)
    assert done.returncode == 1
    assert rows(done)["tfdist"] == ["failed", "(1)"]
    assert "(1) it took longer than 2 s, and was ended: --timeout allows more" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
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
