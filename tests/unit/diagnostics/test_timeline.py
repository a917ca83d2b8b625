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

import hvkeras as hvd
from harness import warm
from harness.launchers import BIN, clean_environment
from hvkeras.compat import graphs
from hvkeras.diagnostics import timeline
from hvkeras.diagnostics.ring_buffer import Rows, ring
from hvkeras.diagnostics.spans import Content, SpanStore


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init()
    yield
    hvd.shutdown()


def test_many_threads_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "FLUSH_EVERY", 0.001)
    made = timeline.Timeline(str(tmp_path / "file"), 3, 'a "host"', SpanStore())

    def add(row: int) -> None:
        for number in range(500):
            made.add(f"row {row}", "allreduce", number * 1000, number * 1000 + 500, row)

    threads = [threading.Thread(target=add, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 30
    while (tmp_path / "file").read_text().count('"X"') < 2000:
        assert time.monotonic() < deadline
    json.loads((tmp_path / "file").read_text())  # whole while it is open
    made.close()
    made.close()
    events = json.loads((tmp_path / "file").read_text())
    assert events[0]["args"]["name"].startswith('rank 3 on a "host", pid ')
    for row in range(4):
        name = f"row {row}"
        own = [event for event in events if event["args"].get("collective") == name]
        assert [(event["ts"], event["dur"]) for event in own] == [(number, 0.5) for number in range(500)]
        assert [event["args"] for event in events if event["name"] == "thread_name"].count({"name": name}) == 1


def test_a_full_timeline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "CAPACITY", 5)
    made = timeline.Timeline(str(tmp_path / "file"), 0, "host", SpanStore())
    for number in range(8):
        made.add("row", "broadcast", number, number + 1, 4)
    made.close()
    events = json.loads((tmp_path / "file").read_text())
    assert sum(event["ph"] == "X" for event in events) == 5
    assert events[-1]["name"] == "3 later collectives are left out"


def test_the_spans_of_functions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ring("test", 2, 8)

    class OneTrack:
        def everything(self) -> dict[str, Any]:
            return {"key": table}

        def runs(self, _: str, rows: Rows) -> Iterator[tuple[Content, float, float]]:
            for began, ended in rows.table.tolist():
                yield Content("label", "allreduce sum", None, "allreduce"), began, ended

    def run(times: int) -> None:
        for _ in range(times):
            table.append([graphs.now(), graphs.now()])

    run(3)  # before it was started
    monkeypatch.setattr(timeline, "COLLECT_EVERY", 1000.0)
    running = timeline.Timeline(str(tmp_path / "file"), 0, "host", OneTrack())
    run(5)
    running.close()
    events = json.loads((tmp_path / "file").read_text())
    ran = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in ran] == ["allreduce"] * 5
    assert all(event["args"] == {"collective": "label", "bytes": None} for event in ran)
    assert abs(ran[0]["ts"] / 1e6 - time.time()) < 1000  # seconds since the epoch
    assert not [event for event in events if event["ph"] == "i"]
    running = timeline.Timeline(str(tmp_path / "file"), 0, "host", OneTrack())
    run(10)
    running.close()
    events = json.loads((tmp_path / "file").read_text())
    assert events[-1]["name"] == "2 collectives came too fast to be seen"
    assert sum(event["ph"] == "X" for event in events) == 8


def test_misuse(tmp_path: Path) -> None:
    hvd.stop_timeline()
    with pytest.raises(hvd.MachineError, match=r"must be writable \(No such file or directory\).*file_path="):
        hvd.start_timeline(str(tmp_path / "missing" / "file"))
    hvd.start_timeline(str(tmp_path / "one"))
    with pytest.raises(hvd.UsageError, match="One timeline can run at a time"):
        hvd.start_timeline(str(tmp_path / "other"))
    hvd.shutdown()
    assert len(json.loads((tmp_path / "one").read_text())) == 1
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
        events = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [event["args"]["collective"] for event in events if event["ph"] == "X"] == ['barrier "b", part 0']
