"""Traces of real ranks: merged on one time axis, limited to their window, and complete after a rank is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome, start_job
from hvkeras.diagnostics.trace_events import COMPUTING, INPUT, STEPS, Event
from hvkeras.diagnostics.trace_files import rank_file

WORKER = Path(__file__).parent / "workers" / "traced.py"
BUCKETS = {"HVKERAS_BUCKET_SIZE": "1KB"}  # one bucket: 64 biases and 64 x 1 weights; the other: 8 x 64 weights
WINDOW = range(12, 21)
TICK = 1.0  # microsecond, the resolution of TensorFlow's clock


def of_rank(trace: dict[str, Any], rank: int, row: str = "") -> list[Event]:
    """Return the events of a rank; of one row, or of all."""
    own = [event for event in trace["traceEvents"] if event["pid"] == rank]
    rows = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    return [event for event in own if event["ph"] == "X" and row in ("", rows[event["tid"]])]


def collectives(trace: dict[str, Any], rank: int) -> dict[Any, Event]:
    found = [event for event in of_rank(trace, rank) if event["cat"] == "collective"]
    named = {(event["args"]["collective"], event["args"].get("step")): event for event in found}
    assert len(named) == len(found)
    return named


@pytest.fixture(params=[pytest.param(run, id="-".join(run), marks=marks) for run, marks in (
    (("hvkeras_run", "native", "fit"), ()), (("tf_config", "tfdist", "fit"), pytest.mark.slow))])
def traced(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> dict[str, Any]:
    launcher, backend, how = request.param
    steps = {"HVKERAS_TRACE_STEPS": f"{WINDOW.start}:{WINDOW.stop}", "HVKERAS_TRACE_FILE": "found.json"}
    outcome = launch_once(launcher, WORKER, (how,), np=2, backend=backend, env={**BUCKETS, **steps})
    said = outcome.output if launcher == "hvkeras_run" else outcome.stderr(0)
    assert f"trace of ranks 0, 1 in {outcome.cwd}/found.json, to be opened at ui.perfetto.dev\n" in said
    assert sorted(file.name for file in outcome.cwd.iterdir()) == ["found.json", "found.rank.0.json",
                                                                   "found.rank.1.json"]
    trace: dict[str, Any] = json.loads((outcome.cwd / "found.json").read_text())
    return trace


def test_the_merged_trace_has_the_steps_of_its_window_on_both_ranks(traced: dict[str, Any]) -> None:
    names = [event["args"]["name"] for event in traced["traceEvents"] if event["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in names] == ["rank 0", "rank 1"]
    for rank in range(2):
        assert [event["args"]["step"] for event in of_rank(traced, rank, STEPS)] == list(WINDOW)
        assert {event["args"].get("step", WINDOW.start) for event in of_rank(traced, rank)} <= set(WINDOW)
        assert of_rank(traced, rank, INPUT)
        computing = of_rank(traced, rank, COMPUTING)
        assert [event["args"]["step"] for event in computing] == list(WINDOW)
        for step, part in zip(of_rank(traced, rank, STEPS), computing, strict=True):
            assert step["ts"] - TICK <= part["ts"]
            assert part["ts"] + part["dur"] <= step["ts"] + step["dur"] + TICK
        fact = traced["otherData"]["ranks"][str(rank)]
        assert (fact["clock_offset"], fact["clock_uncertainty"], fact["missing_steps"]) == (0.0, 0.0, 0)


def test_collectives_overlap_in_time_with_the_same_on_the_other_rank(traced: dict[str, Any]) -> None:
    mine, theirs = collectives(traced, 0), collectives(traced, 1)
    of_steps = {key for key in mine if key[1] is not None}
    assert of_steps == {key for key in theirs if key[1] is not None}
    parts = {label: {key[1] for key in of_steps if key[0] == label} for label, _ in of_steps}
    gradients = {label: steps for label, steps in parts.items() if "the gradients of" in label}
    assert len(gradients) == 2
    assert all(steps == set(WINDOW) for steps in gradients.values())
    assert sorted(mine[label, WINDOW.start]["args"]["bytes"] for label in gradients) == [4 * (64 + 64 + 1), 4 * 8 * 64]
    for key in of_steps:
        begin = max(mine[key]["ts"], theirs[key]["ts"])
        assert begin <= min(each[key]["ts"] + each[key]["dur"] for each in (mine, theirs)) + TICK


def test_a_trace_is_whole_though_a_rank_is_killed(tmp_path: Path) -> None:
    steps = {"HVKERAS_TRACE_STEPS": "5:9000"}
    with start_job("hvkeras_run", WORKER, ("endless",), np=2, folder=tmp_path, backend="native", expect_failure=True,
                   env={**BUCKETS, **steps}, deadline=90.0) as job:
        path = job.cwd / "trace.json"
        mine = rank_file(path, 1)
        deadline = time.monotonic() + 60
        while not (mine.exists() and of_rank(json.loads(mine.read_text()), 1)):  # the file is valid JSON at any time
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(job.pid(1), signal.SIGKILL)
        outcome = job.wait()
    assert "ranks 0, 1 ended before the window did" in outcome.output
    for file in (path, rank_file(path, 0), rank_file(path, 1)):
        assert json.loads(file.read_text())["traceEvents"]
    for rank in range(2):
        seen = [event["args"]["step"] for event in of_rank(json.loads(path.read_text()), rank, STEPS)]
        assert seen == list(range(5, 5 + len(seen)))
        assert seen
    facts = json.loads(path.read_text())["otherData"]["ranks"]
    assert not facts["1"]["done"]
