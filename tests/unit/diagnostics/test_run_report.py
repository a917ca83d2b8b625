"""What a report on a run says of records, and of none."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvkeras.diagnostics.findings import THRESHOLDS, findings, limit, machine_notes, milliseconds, slowest_rank
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.diagnostics.record import WELL, Record
from hvkeras.diagnostics.run_report import write_report
from hvkeras.diagnostics.run_summary import Summary
from hvkeras.diagnostics.time_split import TimeSplit
from hvkeras.errors import MachineError

FEW = int(THRESHOLDS["steps"]) - 1
ENOUGH = int(THRESHOLDS["seconds"] / 0.1)  # steps of 0.1 s or more


def split(**parts: Any) -> TimeSplit:
    given = {"input": 0.0, "compute": 0.1, "wait": 0.0, "communication": 0.0, "hidden": 0.0, "steps": ENOUGH, **parts}
    step = sum(given[part] or 0.0 for part in ("input", "compute", "wait", "communication", "update") if part in given)
    return TimeSplit(step=step, **given)


def summary(*splits: TimeSplit) -> Summary:
    records = [Record(rank, len(splits), "native", host=f"node{rank}") for rank in range(len(splits))]
    return Summary(Path("records"), len(splits), records, None, dict(enumerate(splits)), [])


def whats(*splits: TimeSplit) -> list[str]:
    return [finding.what for finding in findings(summary(*splits))]


@pytest.mark.parametrize(("splits", "expected"), [
    ([split(), split()], []),
    ([split(input=0.05), split(input=0.05)], ["input"]),
    ([split(communication=0.1), split(communication=0.1)], ["communication"]),
    ([split(communication=0.1, wait=None), split(communication=0.1, wait=None)], ["communication"]),
    ([split(wait=0.03), split(wait=0.03)], ["wait"]),
    ([split(update=0.02), split(update=0.02)], ["update"]),
    ([split(update=0.02)], []),  # one rank has nobody to share it with
    ([split(wait=0.2), split(input=0.2)], ["slow rank"]),  # the other one does not wait for data
    ([split(wait=0.1, input=0.1), split(input=0.2)], ["input", "slow rank"]),
    ([split(wait=0.2), split(compute=0.3)], ["slow rank"]),
    ([split(wait=0.01), split(compute=0.11)], []),
    ([split(input=0.05, compute=1.0, steps=FEW), split(input=0.05)], []),  # nothing is said from too few steps
    ([split(wait=0.2), split(compute=0.3, steps=FEW)], []),
    ([split(wait=0.2), split(compute=0.01, input=0.01)], []),  # nor from a second of them
], ids=str)
def test_findings(splits: list[TimeSplit], expected: list[str]) -> None:
    assert sorted(whats(*splits)) == sorted(expected)


def test_the_slow_rank_is_named_with_its_reason() -> None:
    found = slowest_rank({0: split(wait=0.2), 1: split(input=0.2), 2: split(wait=0.19, compute=0.11)})
    assert found is not None and found.rank == 1 and found.parts == pytest.approx({"input": 0.2})
    [finding] = findings(summary(split(wait=0.3), split(input=0.1, compute=0.3)))
    assert "rank 1 on node1" in finding.text
    assert "its input takes 100 ms longer and its computing takes 200 ms longer than" in finding.text


def test_8_bits_are_suggested_between_hosts_where_communication_takes_a_third() -> None:
    def remedy(communication: float, host: str = "") -> str:
        made = summary(*[split(communication=communication)] * 2)
        for one in made.present:
            one.host = host or one.host
        [finding] = findings(made)
        return finding.remedy

    assert "Compression.int8" in remedy(0.06)
    assert "Compression.int8" not in remedy(0.04)
    assert "Compression.int8" not in remedy(0.06, "one host")


def test_times_are_short() -> None:
    assert [milliseconds(each) for each in (0.00123456, 0.0456789, 12.3456)] == ["1.23 ms", "45.7 ms", "12,346 ms"]


def record(rank: int, **facts: Any) -> Record:
    times = 1000.0 + 0.1 * np.arange(40)
    stamps = np.column_stack([times, 8.0 * np.arange(40), np.zeros(40), times - 0.05])
    runs = np.column_stack([times, times + 0.01])
    return Record(rank, 2, "native", host="a<b>", pid=7, stamps=stamps, collectives={"k": runs}, first_runs={"k": 0},
                  buckets={"k": {"label": "the gradients of <Adam>", "operation": "gradients", "how": "average",
                                 "bytes": 2_000_000}}, peak_memory=2**30, began=1000.0, written=1004.0, **facts)


def report(folder: Path) -> tuple[dict[str, Any], str]:
    page = write_report(folder)
    return json.loads((folder / "report.json").read_text()), page.read_text()


def test_a_report_on_a_run_that_ended_well(tmp_path: Path) -> None:
    for rank in range(2):
        record(rank, ended=WELL, stalls=["rank 1 is late"] * (rank == 0), compiling=2.5 + rank).write(
            tmp_path / "records")
    found, page = report(tmp_path)
    assert found["sentences"][0].startswith("Training ended well on all ranks: 40 steps")
    assert [rank["ended"] for rank in found["ranks"]] == [WELL, WELL]
    assert found["ranks"][0]["split"]["step"] == pytest.approx(0.1)
    assert found["sentences"][-1] == "XLA compiled the optimizer's update in 3.5 s, before the first step."
    assert [rank["compile_seconds"] for rank in found["ranks"]] == [2.5, 3.5]
    assert found["collectives"] == [{
        "label": "the gradients of <Adam>", "operation": "gradients", "how": "average", "bytes": 2_000_000, "runs": 40,
        "seconds": pytest.approx(0.01), "bytes_per_second": pytest.approx(2e8)}]
    assert found["stalls"] == ["rank 1 is late"] and "rank 1 is late" in page
    assert "gradients of &lt;Adam&gt;" in page and "a&lt;b&gt;" in page and "1 GiB" in page
    assert not list(tmp_path.glob(".*"))
    assert write_report(tmp_path / "records").parent == tmp_path / "records"  # the folder of the records does as well


def test_a_report_on_a_run_of_which_little_is_left(tmp_path: Path) -> None:
    record(0).write(tmp_path / "records")
    (tmp_path / "records" / "rank.1.npz").write_bytes(b"half a file")
    found, page = report(tmp_path)
    assert [rank["ended"] for rank in found["ranks"]] == [
        "was running when its record was last written, or was killed", "its record cannot be read"]
    assert found["ranks"][0]["split"]["wait"] is None and found["slowest"] is None
    assert "Only 1 of 2 records were found" in page
    Outcome(2, ["a", "b"], {"1": "was killed by SIGKILL"}, "rank 1 on b was killed by SIGKILL").write(
        tmp_path / "records")
    found, page = report(tmp_path)
    assert [rank["ended"] for rank in found["ranks"]] == [WELL, "was killed by SIGKILL"]
    assert found["sentences"][0].startswith("Training did not end well: rank 1 on b was killed by SIGKILL.")


def test_a_report_on_an_elastic_job_shows_its_ranks_over_time(tmp_path: Path) -> None:
    ended = record(0)
    ended.ended, ended.written, ended.size = WELL, 160.0, 1
    ended.write(tmp_path / "records")
    changes = [{"time": 120.0, "size": 3, "commit": 12, "repeated": 4, "seconds": 0.5, "why": "rank 1 on b <died>"},
               {"time": 140.0, "size": 4, "commit": 20, "repeated": 0, "seconds": 0.25, "why": ""}]
    Outcome(1, ["a"], changes=changes, first_size=4, began=100.0).write(tmp_path / "records")
    found, page = report(tmp_path)
    assert found["changes"] == changes
    assert "0.8 s and 4 repeated steps were lost in all" in page
    assert "ranks against seconds: 4, 3, 4" in page
    assert "rank 1 on b &lt;died&gt;" in page and "workers joined or left" in page


def test_a_report_says_why_it_knows_no_steps(tmp_path: Path) -> None:
    Record(0, 1, "native", no_steps="the step is compiled by XLA", ended=WELL).write(tmp_path / "records")
    found, _ = report(tmp_path)
    assert "as the step is compiled by XLA" in found["sentences"][1]
    assert found["advice"] == [] and found["ranks"][0]["split"] is None


def test_few_steps_give_no_advice(tmp_path: Path) -> None:
    few = record(0)
    few.stamps, few.size = few.stamps[:20], 1
    few.write(tmp_path / "records")
    found, _ = report(tmp_path)
    assert found["advice"] == [] and found["sentences"][-1] == (
        "The run is too short to judge what limits it: 14 typical steps, 1.4 s in all, were timed on a rank, and at"
        " least 20 steps and 5 s are needed. Train 4 times as long, for example with 4 times the epochs in fit.")
    for command, option in (("train.py --epochs 3 --lr 1", "--epochs 12."), ("train.py --epochs=10", "--epochs=40.")):
        assert limit({0: split(steps=14)}, [], command).endswith(f"Train 4 times as long: {option}")


def test_a_piece_of_advice_is_in_a_report_once(tmp_path: Path) -> None:
    for rank in range(2):
        made = record(rank, ended=WELL)
        times = 1000.0 + 0.2 * np.arange(40)
        made.stamps = np.column_stack([times, 8.0 * np.arange(40), np.zeros(40), times - 0.05])
        made.collectives = {"k": np.column_stack([times, times + 0.06])}
        made.updates = np.column_stack([times + 0.06, times + 0.1])
        made.write(tmp_path / "records")
    found, page = report(tmp_path)
    assert sorted(each["what"] for each in found["advice"]) == ["communication", "update"]
    text = unescape(page)
    for each in found["advice"]:
        assert text.count(each["text"]) == text.count(each["remedy"]) == 1
    assert sum(f"What limits training most: {found['advice'][0]['text']}" in each for each in found["sentences"]) == 1


def test_ranks_that_share_cores_are_reported_with_others_that_use_them() -> None:
    made = summary(*[split(wait=0.05)] * 4)
    for one in made.present:
        one.host, one.cores, one.core_limit = "node", [0, 1], 2.0
        one.began, one.written, one.used, one.busy = 100.0, 110.0, 4.0, 19.2
    shared, busy = machine_notes(made)
    assert shared == ("4 ranks share 2 cores on node, so each step takes longer than with 2 ranks: start fewer ranks"
                      " there.")
    assert busy.startswith("Other processes used 16% of the ranks' cores on node during training: ")
    assert [each.remedy for each in findings(made)] == ["They also wait for free cores."]
    for one in made.present:
        one.gpu, one.busy = "GPU", 18.0
    assert machine_notes(made) == []
    for rank, one in enumerate(made.present):  # each has cores of its own, but the container's quota is less
        one.gpu, one.cores, one.core_limit = "", [2 * rank, 2 * rank + 1], 1.5
    assert machine_notes(made)[0].startswith("4 ranks share 1.5 cores on node, so each step takes longer than with 1 ")


def test_nothing_makes_no_report(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="needs the records of ranks"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())
