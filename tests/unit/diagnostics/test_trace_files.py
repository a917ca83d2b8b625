"""The files of a trace: each rank's, and the one that `hvkeras trace` merges."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvkeras.cli.main import main
from hvkeras.diagnostics import trace_files
from hvkeras.diagnostics.record import Record
from hvkeras.settings import LONGEST_TRACE, window_of_steps

EVENT = {"name": "step 3", "ph": "X", "tid": 1, "ts": 1.5, "dur": 1.0, "args": {}}


def leave(path: Path, rank: int, size: int = 2, **facts: Any) -> None:
    known = {"rank": rank, "size": size, "host": "node", "pid": 7 + rank, "steps": "3:5", "missing_steps": 0,
             "done": True, "no_steps": "", "machine": str(rank), "clock_offset": 0.0, "clock_uncertainty": 0.0, **facts}
    record = Record(rank, size, "native", host="node", pid=7 + rank)
    trace_files.write(trace_files.rank_file(path, rank), [*trace_files.process_name(record), {"pid": rank, **EVENT}],
                      known)


def names(path: Path) -> list[str]:
    return [event["args"]["name"] for event in json.loads(path.read_text())["traceEvents"]
            if event["name"] == "process_name"]


def test_a_folder_s_traces_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        leave(tmp_path / "trace.json", rank)
    leave(tmp_path / "other.v2", 0, size=1)
    assert main(["trace", str(tmp_path)]) == 0
    assert names(tmp_path / "trace.json") == ["rank 0 on node, pid 7", "rank 1 on node, pid 8"]
    assert names(tmp_path / "other.v2") == ["rank 0 on node, pid 7"]
    said = capsys.readouterr().out.splitlines()
    assert said[1] == f"hvkeras trace: trace of ranks 0, 1 in {tmp_path}/trace.json, to be opened at ui.perfetto.dev"
    assert main(["trace", str(tmp_path / "trace.json")]) == 0
    facts = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert (facts["steps"], facts["missing"], facts["ranks"]["1"]["pid"]) == ("3:5", [], 8)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.rank.0.v2", "other.v2", "trace.json", "trace.rank.0.json", "trace.rank.1.json"]


def test_what_is_not_whole_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    leave(path, 0, size=4, missing_steps=1, clock_uncertainty=0.001)
    leave(path, 2, size=4, clock_uncertainty=0.002)
    leave(path, 3, size=4, clock_uncertainty=0.003)
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 0 ended before the window did; rank 1 left no file here" in said
    assert "agree within 5 ms" in said
    leave(path, 1, size=4, clock_uncertainty=None)
    merged = trace_files.merge(path)
    assert merged is not None
    assert (merged.missing, merged.uncertainty) == ((), None)
    assert "not all clocks could be compared" in merged.sentence()


def test_ranks_of_one_machine_share_the_best_offset(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    leave(path, 0, size=3, machine="a")
    leave(path, 1, size=3, machine="b", clock_offset=2.0, clock_uncertainty=0.5)
    leave(path, 2, size=3, machine="b", clock_offset=3.0, clock_uncertainty=0.25)
    merged = trace_files.merge(path)
    assert merged is not None
    assert merged.uncertainty == 0.25
    found = json.loads(path.read_text())
    assert [event["ts"] for event in found["traceEvents"] if event["ph"] == "X"] == [1.5, 1e6 + 1.5, 1.5]
    assert [found["otherData"]["ranks"][rank]["clock_offset"] for rank in "012"] == [0.0, 3.0, 3.0]
    for rank in range(3):
        leave(path, rank, size=3, machine="a", clock_uncertainty=None)
    merged = trace_files.merge(path)
    assert merged is not None
    assert merged.uncertainty == 0.0  # one machine, one clock


def test_files_of_earlier_jobs_stay_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for rank in range(3):
        leave(path, rank, size=3)
        os.utime(trace_files.rank_file(path, rank), (1000, 1000))
    leave(path, 0, size=2)
    merged = trace_files.merge(path)
    assert merged is not None
    assert (merged.ranks, merged.missing) == ((0,), (1,))


def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in (tmp_path, tmp_path / "missing", tmp_path / "missing" / "trace.json"):
        assert main(["trace", str(index)]) == 2
        assert "HINT: record with hvkeras run --trace-steps 100:120" in capsys.readouterr().err
    for content in ("{", "[]", "{}", '{"traceEvents": [], "otherData": {"size": 2}}'):
        (tmp_path / "trace.rank.0.json").write_text(content)
        assert main(["trace", str(tmp_path)]) == 2
        assert "must be traces of ranks" in capsys.readouterr().err
    leave(tmp_path / "trace.json", 0)
    (tmp_path / "trace.json").mkdir()
    assert main(["trace", str(tmp_path)]) == 1
    assert "must be writable" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.json", "trace.rank.0.json"]


@pytest.mark.parametrize("text", ["", "5", "5:", "5:5", "6:5", "-1:5", "a:5", "1:2:3", "1.5:2",
                                  f"0:{LONGEST_TRACE + 1}"])
def test_windows_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="window"):
        window_of_steps(text)
    assert main(["run", "-np", "2", f"--trace-steps={text}", "true"]) == 2
    assert "--trace-steps" in capsys.readouterr().err


def test_windows_are_python_s_slices(capsys: pytest.CaptureFixture[str]) -> None:
    assert window_of_steps("100:120") == (100, 120)
    assert window_of_steps(" :3 ") == (0, 3)
    assert main(["run", "-np", "2", "--trace-file", "t.json", "true"]) == 2
    assert "--trace-file needs --trace-steps" in capsys.readouterr().err
    assert main(["run", "-np", "2", "--trace-steps", "1:2", "--trace-file", "no/t.json", "true"]) == 2
    assert "The trace's folder must exist" in capsys.readouterr().err
