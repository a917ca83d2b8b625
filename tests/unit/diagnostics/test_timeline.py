"""The timeline's file: whole at all times, bounded, and refused where it cannot be."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import hvkeras as hvd
from harness import warm
from harness.launchers import BIN, clean_environment
from hvkeras.backends.interface import Reduction
from hvkeras.diagnostics import spans, tracer
from hvkeras.job.plans import Plan
from hvkeras.job.session import current_session


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init()
    yield
    hvd.shutdown()


def bars(path: Path) -> list[dict[str, Any]]:
    """The collectives in a trace, which is whole at any time."""
    trace = json.loads(path.read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "collective"]


def reduce(label: str) -> None:
    """One allreduce of an engine of one rank, as `hvkeras.collectives.dispatch` runs it."""
    plan = Plan.of("allreduce", [tf.zeros(1)], (0,), label)
    spans.store().timed(current_session().backend, plan).allreduce([tf.zeros(1)], f"{plan.key}.0", Reduction.SUM, (0,))


def notes(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "i"]


def test_threads_write_to_it_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "WRITE_EVERY", 0.001)
    hvd.start_timeline(str(tmp_path / "file"))

    def add(row: int) -> None:
        for _ in range(50):
            reduce(f"row {row}")

    threads = [threading.Thread(target=add, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        bars(tmp_path / "file")
    for thread in threads:
        thread.join()
    hvd.stop_timeline()
    trace = json.loads((tmp_path / "file").read_text())
    assert trace["traceEvents"][0]["args"]["name"].startswith("rank 0 on ")
    assert trace["otherData"]["size"] == 1
    found = bars(tmp_path / "file")
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    for row in range(4):
        own = [event for event in found if event["args"]["collective"] == f"row {row}, part 0"]
        assert len(own) == 50 and len({event["tid"] for event in own}) == 1
        assert all(rows[event["tid"]] == event["args"]["collective"] and event["args"]["bytes"] == 4 for event in own)
    assert abs(found[0]["ts"] / 1e6 - time.time()) < 1000  # microseconds since the epoch
    assert notes(tmp_path / "file") == []


def test_a_full_timeline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "CAPACITY", 5)
    monkeypatch.setattr(tracer, "LOOK_EVERY", 0.01)
    hvd.start_timeline(str(tmp_path / "file"))
    for number in range(12):
        reduce(str(number))
        time.sleep(0.05)
    hvd.stop_timeline()
    there = len(bars(tmp_path / "file"))
    assert 5 < there < 12
    assert notes(tmp_path / "file") == [f"{12 - there} later spans are left out"]


def test_spans_that_are_overwritten_before_they_are_read_are_counted(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "LOOK_EVERY", 1000.0)
    monkeypatch.setattr(tracer, "WRITE_EVERY", 1000.0)
    monkeypatch.setattr(spans, "CAPACITY", 8)

    @tf.function
    def run(times: Any) -> None:
        for _ in tf.range(times):
            reduce("one")

    hvd.start_timeline(str(tmp_path / "file"))
    run(tf.constant(10))
    hvd.stop_timeline()
    assert (len(bars(tmp_path / "file")), notes(tmp_path / "file")) == (
        8, ["2 spans were overwritten before they were read"])
    run(tf.constant(3))  # between two timelines
    hvd.start_timeline(str(tmp_path / "file"))
    run(tf.constant(5))
    hvd.stop_timeline()
    assert (len(bars(tmp_path / "file")), notes(tmp_path / "file")) == (5, [])


def test_misuse(tmp_path: Path) -> None:
    hvd.stop_timeline()
    with pytest.raises(hvd.MachineError, match=r"must be writable \(No such file or directory\).*file_path="):
        hvd.start_timeline(str(tmp_path / "missing" / "file"))
    hvd.start_timeline(str(tmp_path / "one"))
    with pytest.raises(hvd.UsageError, match="One timeline can run at a time"):
        hvd.start_timeline(str(tmp_path / "other"))
    hvd.shutdown()
    assert bars(tmp_path / "one") == []
    with pytest.raises(hvd.NotInitializedError):
        hvd.start_timeline(str(tmp_path / "one"))
    hvd.init()


def test_the_launcher_starts_one_and_a_script_that_ends_closes_it(tmp_path: Path) -> None:
    flags = ["-np", "2", "--timeline-filename", "{rank}.json"]
    script = "import hvkeras; hvkeras.init(); hvkeras.barrier(name='b')"
    environment = clean_environment(tmp_path)
    subprocess.run([str(BIN / "hvkeras"), "run", *flags, *warm.python(environment), "-c", script], cwd=tmp_path,
                   check=True, env=environment, timeout=120)
    for rank in range(2):
        assert [event["args"]["collective"] for event in bars(tmp_path / f"{rank}.json")] == ['barrier "b", part 0']
