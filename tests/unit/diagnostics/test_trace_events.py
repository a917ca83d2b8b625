"""From a rank's record to the rows of a trace."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from hvkeras.diagnostics.record import Record
from hvkeras.diagnostics.trace_events import COMPUTING, INPUT, STEPS, Event, events

KIND = {"operation": "gradients", "how": "average", "collective": "allreduce"}
BUCKETS = {"k.0": {"label": "gradients, bucket 0", "bytes": 4000, **KIND},
           "k.1": {"label": "gradients, bucket 1", "bytes": None, **KIND}}


def of_row(found: list[Event], row: str) -> list[tuple[str, float, float]]:
    """Name, begin and end, in seconds, of what a row shows."""
    json.loads(json.dumps(found))
    numbers = {event["args"]["name"]: event["tid"] for event in found if event["name"] == "thread_name"}
    return [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in found
            if event["ph"] == "X" and event["tid"] == numbers.get(row)]


def fitted(steps: int = 6) -> Record:
    """Step n takes the second after 10 n: input 0.1, gradients at 0.5, two collectives at 0.4 and 0.5."""
    begins = 10.0 * np.arange(steps)

    def rows(*ends: float) -> np.ndarray:
        return np.stack([begins + end for end in ends], axis=1)

    numbers = np.arange(steps)
    return Record(1, 2, "native", stamps=np.pad(begins[:, None] + 0.5, ((0, 0), (0, 3))), inputs=rows(0.0, 0.1),
                  calls=np.stack([begins, begins + 1, numbers, numbers], axis=1),
                  collectives={"k.0": rows(0.4, 0.7), "k.1": rows(0.5001, 0.9)}, buckets=BUCKETS)


def test_only_the_window_is_shown_with_python_s_idea_of_a_slice() -> None:
    found = events(fitted(), (2, 4))
    assert of_row(found, STEPS) == [("step 2", 20.0, 21.0), ("step 3", 30.0, 31.0)]
    assert of_row(found, INPUT) == [("input", 20.0, 20.1), ("input", 30.0, 30.1)]
    assert of_row(found, COMPUTING) == [("gradients", 20.1, 20.5), ("gradients", 30.1, 30.5)]
    assert of_row(found, "train function")[0][0] == "train function, step 2"
    assert of_row(found, "gradients, bucket 0") == [("allreduce", 20.4, 20.7), ("allreduce", 30.4, 30.7)]
    sent = [event["args"] for event in found if event["name"] == "allreduce"]
    assert sent[:2] == [
        {"collective": "gradients, bucket 0", "operation": "gradients", "how": "average", "bytes": 4000, "step": 2},
        {"collective": "gradients, bucket 1", "operation": "gradients", "how": "average", "bytes": None, "step": 2}]
    assert {event["pid"] for event in found} == {1}
    assert events(fitted(), (6, 8)) == []


def test_the_offset_brings_times_to_the_common_clock() -> None:
    found = events(dataclasses.replace(fitted(), clock_offset=-0.25), (2, 3))
    assert of_row(found, STEPS) == [("step 2", 19.75, 20.75)]


def test_what_happens_between_steps_belongs_to_the_window_and_to_no_step() -> None:
    record = fitted()
    record.inputs = record.inputs - 2.0  # fetched before the call
    record.collectives["k.1"] = record.collectives["k.1"] + 5.0
    found = events(record, (2, 4))
    assert of_row(found, INPUT) == [("input", 18.0, 18.1), ("input", 28.0, 28.1)]
    assert [event["args"].get("step", "none") for event in found if event["args"].get("bytes", 0) is None] \
        == ["none", "none"]


def test_loops_of_one_s_own_have_steps_from_when_their_gradients_are_ready() -> None:
    record = fitted()
    record.calls, record.first_step = np.zeros((0, 4)), 100
    found = events(record, (101, 103))
    assert of_row(found, STEPS) == [("step 101", 0.9, 10.9), ("step 102", 10.9, 20.9)]
    assert of_row(found, COMPUTING) == [("gradients", 10.1, 10.5), ("gradients", 20.1, 20.5)]
    assert of_row(found, "gradients, bucket 1") == [("allreduce", 10.5001, 10.9), ("allreduce", 20.5001, 20.9)]
    record.collectives = {}
    assert of_row(events(record, (101, 102)), STEPS) == [("step 101", 0.5, 10.5)]


def test_late_collectives_belong_to_the_step_whose_gradients_they_carry() -> None:
    record = fitted()
    record.calls = np.zeros((0, 4))
    record.collectives["k.1"] = record.collectives["k.1"] + 4.0  # half way to the next step's gradients
    assert of_row(events(record, (2, 3)), STEPS) == [("step 2", 14.9, 24.9)]
    assert [event["args"]["step"] for event in events(record, (2, 3)) if event["name"] == "allreduce"] == [2, 2]


def test_several_steps_of_one_call_are_told_apart_by_when_their_gradients_are_ready() -> None:
    record = fitted()
    record.calls = np.array([[0.0, 29.0, 0, 2], [30.0, 60.0, 3, 5]])
    expected = [("step 1", 0.9, 10.9), ("step 2", 10.9, 29.0), ("step 3", 30.0, 30.9)]
    assert of_row(events(record, (1, 4)), STEPS) == expected
    late = record.collectives["k.1"] + 9.0  # just before the next step's gradients
    record.collectives["k.1"] = late
    record.calls[:, 1] = 29.95, 69.95
    assert of_row(events(record, (1, 2)), STEPS) == [("step 1", 9.9, 19.9)]
    busy = events(dataclasses.replace(record, stamps=record.stamps + 9.45), (1, 2))
    assert of_row(busy, COMPUTING) == [("gradients", 10.1, 19.9)]
    record.collectives["k.1"] = late[1:]  # one is lost
    assert of_row(events(record, (1, 2)), STEPS) == [("step 1", 0.7, 10.7)]
    record.stamps = record.stamps[:0]
    assert of_row(events(record, (1, 3)), STEPS) == [("steps 0 to 2", 0.0, 29.95)]
    assert of_row(events(record, (1, 3)), COMPUTING) == []


def test_rows_are_in_the_order_that_people_count_in() -> None:
    record = fitted()
    record.collectives = {str(number): record.collectives["k.0"] for number in (10, 2)}
    record.buckets = {key: {"label": f"part {key}"} for key in ("2", "10")}
    found = [event["args"]["name"] for event in events(record, (2, 3)) if event["name"] == "thread_name"]
    assert found == ["steps", "input", "train function", "computing", "part 2", "part 10"]


def test_calls_without_steps_and_ranks_without_anything_are_left_out() -> None:
    record = fitted()
    record.calls[:, 3] = -1  # compiled by XLA: nothing tells the steps
    assert events(record, (0, 4)) == []
    assert events(Record(0, 1, "native"), (0, 4)) == []
