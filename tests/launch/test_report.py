"""`hvkeras run --report`, HVKERAS_REPORT and `hvkeras report`: reports of jobs with a slow or killed rank."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome
from hvkeras.diagnostics import findings
from hvkeras.diagnostics.findings import THRESHOLDS
from hvkeras.diagnostics.record import WELL, Record
from hvkeras.diagnostics.run_report import write_report
from launch.hvkeras_run import run, warm_ranks

WORKER = Path(__file__).parent / "workers" / "reported.py"
STEPS = 40  # per part of the worker
JOBS = [pytest.param(("hvkeras_run", "native", "1"), id="native"),
        pytest.param(("tf_config", "horovod", "1"), id="horovod", marks=pytest.mark.nightly),
        pytest.param(("hvkeras_run", "tfdist", "4"), id="tfdist", marks=pytest.mark.nightly)]


@pytest.fixture(params=JOBS)
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, steps = request.param
    return launch_once(launcher, WORKER, (steps,), np=2, backend=backend, env={"HVKERAS_REPORT": "report"})


def data(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def check_slowest(found: dict[str, Any], rank: int, part: str) -> None:
    """Assert that the report names the slowest rank and the reason, in its data and in its text."""
    assert found["slowest"]["rank"] == rank and list(found["slowest"]["because"]) == [part]
    assert found["advice"][0]["what"] == "slow rank"
    told = {"input": "its input takes", "compute": "its computing takes"}[part]
    assert f"rank {rank} on {found['ranks'][rank]['host']}" in found["advice"][0]["text"]
    assert told in found["sentences"][-1]
    for each in found["ranks"]:
        split = each["split"]
        assert split["steps"] >= THRESHOLDS["steps"] and each["steps"] == STEPS and each["peak_memory"] > 0
        assert split["step"] == pytest.approx(sum(split[name] for name in ("input", "compute", "update", "wait",
                                                                           "communication")))
    slow, other = found["ranks"][rank]["split"], found["ranks"][1 - rank]["split"]
    assert slow[part] > slow["step"] / 2 and other["wait"] > other["step"] / 2
    [exchange] = [each for each in found["collectives"] if each["operation"].startswith("gradients")]
    assert exchange["bytes"] == 4 * (16 * 32 + 32 + 32 + 1) and exchange["runs"] == STEPS
    assert exchange["bytes_per_second"] == pytest.approx(exchange["bytes"] / exchange["seconds"])


@pytest.fixture
def seconds_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept records of a second or two in this process."""
    monkeypatch.setattr(findings, "THRESHOLDS", {**THRESHOLDS, "seconds": 1.0})


@pytest.mark.slow
@pytest.mark.usefixtures("seconds_are_enough")
def test_slow_data_are_distinguished_from_slow_computing(outcome: Outcome) -> None:
    found = data(outcome.cwd / "report")  # written at the end of the job
    assert found["advice"] == [] and "The run is too short to judge what limits it: " in found["sentences"][-1]
    without_charts = (outcome.cwd / "report" / "report.html").read_text()  # matplotlib is hidden from jobs of tests
    assert "<svg" not in without_charts and "There are no charts, as matplotlib" in without_charts
    write_report(outcome.cwd / "input")  # the records up to the first shutdown
    check_slowest(data(outcome.cwd / "input"), 1, "input")
    write_report(outcome.cwd / "report")
    check_slowest(data(outcome.cwd / "report"), 0, "compute")
    assert [each["ended"] for each in data(outcome.cwd / "report")["ranks"]] == [WELL, WELL]
    assert "<svg" in (outcome.cwd / "input" / "report.html").read_text()


@pytest.mark.slow
def test_records_tell_of_fit(outcome: Outcome) -> None:
    for rank in range(2):
        record = Record.read(outcome.cwd / "input" / "records", rank)
        assert record is not None
        steps = record.calls[:, 2:].astype(int).tolist()
        length = STEPS // len(steps)
        assert length in (1, 4)
        assert steps == [[first, first + length - 1] for first in range(0, STEPS, length)]
        assert len(record.inputs) == STEPS  # without validation
        assert len(record.losses) and (record.losses[:, 1] > 0).all()
        assert (record.rank, record.host != "", record.pid > 0) == (rank, True, True)


@pytest.mark.usefixtures("seconds_are_enough")
def test_a_killed_rank_leaves_a_report_that_says_so(tmp_path: Path) -> None:
    command = warm_ranks([sys.executable, str(WORKER), "killed"])
    done = run(["-np", "2", "--report", "--backend", "native", *command], tmp_path)
    assert done.returncode == 137
    folder = tmp_path / "hvkeras-report"
    assert f"the report on this run is {folder / 'report.html'}" in done.stderr
    assert re.fullmatch(r"hvkeras run: rank 1 on \S+ \(pid \d+\) was killed by SIGKILL\.", done.stderr.splitlines()[-2])
    found = data(folder)
    assert found["ranks"][1]["ended"] == "was killed by SIGKILL"
    # the reason for the survivor's end
    assert found["ranks"][0]["ended"].startswith(f"rank 1 on {found['ranks'][1]['host']}")
    assert "rank 1" in found["sentences"][0] and "SIGKILL" in found["sentences"][0]
    assert all(rank["steps"] > STEPS for rank in found["ranks"])
    write_report(folder)
    assert data(folder)["slowest"]["rank"] == 1 and list(data(folder)["slowest"]["because"]) == ["input"]
    (folder / "records" / "outcome.json").unlink()
    (folder / "report.html").unlink()
    again = run([], tmp_path, command="report")
    assert (again.returncode, again.stdout) == (0, "hvkeras-report/report.html\n"), again.stderr
    assert "or was killed" in data(folder)["ranks"][1]["ended"]


@pytest.mark.parametrize("samples", [["300 (50%)", "300 (50%)"], pytest.param(["600"], marks=pytest.mark.slow)])
def test_a_report_shows_that_ranks_share_the_work_of_a_script(samples: list[str], tmp_path: Path) -> None:
    code = """
import keras
import numpy as np

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((300, 4)), np.ones(300), batch_size=30, epochs=2, verbose=0)
model.evaluate(np.ones((300, 4)), np.ones(300), verbose=0)
"""
    arguments = ["--data-parallel", "--report", "-np", str(len(samples))]
    done = run([*arguments, sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    found = data(tmp_path / "hvkeras-report")["ranks"]
    assert [(rank["steps"], rank["samples"], rank["ended"]) for rank in found] == [
        (20, 600 // len(samples), WELL)] * len(samples)
    page = (tmp_path / "hvkeras-report" / "report.html").read_text()
    assert all(f">{text}<" in page for text in samples)


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    done = run(["nothing"], tmp_path, command="report")
    assert done.returncode == 1 and "needs the records of ranks" in done.stderr
    assert not list(tmp_path.glob("nothing"))
