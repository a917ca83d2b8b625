"""Where the times of a collective are recorded, by how it runs and who asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.backends.capabilities import RecordsTimes
from hvkeras.plans.plan import Plan
from hvkeras.profiling import spans
from hvkeras.profiling.ring_buffer import PythonRing, Reader

PLAN = Plan.of("gradients average", [tf.zeros(3)], (0, 1), "the gradients of a test")
IN_MESSAGES = "the gradients of a test, part 0"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spans, "_collectives", {})
    monkeypatch.setattr(spans, "_updates", {})
    monkeypatch.setattr(spans, "_contents", {})
    monkeypatch.setattr(spans, "_outside", PythonRing(3, 16))
    yield
    spans.stop("test")


class Copies:
    """A backend that returns its input."""

    def allreduce(self, tensors: Sequence[Any], _: str) -> list[Any]:
        return [tf.identity(tensor) for tensor in tensors]


def reduce(tensor: Any, backend: Any = None) -> Any:
    [result] = spans.timed(backend or Copies(), PLAN).allreduce([tensor], f"{PLAN.key}.0")
    return result


def recorded(track: str) -> list[spans.Content]:
    rows = spans.everything()[track].rows()
    ran = list(spans.runs(track, rows))
    assert all(began <= ended for _, began, ended in ran)
    return [content for content, _, _ in ran]


def test_nothing_is_added_while_nobody_records() -> None:
    backend: Any = Copies()
    assert spans.timed(backend, PLAN) is backend
    with spans.in_step():
        assert spans.timed(backend, PLAN) is backend
    graph = tf.function(reduce).get_concrete_function(tf.zeros(3)).graph
    assert {operation.type for operation in graph.get_operations()} == {"Placeholder", "Identity"}


@pytest.mark.parametrize("outside_steps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_functions_and_eager_steps_share_a_track(outside_steps: bool) -> None:
    spans.start("test", outside_steps)
    function = tf.function(reduce)
    function(tf.zeros(3))
    with spans.in_step():
        reduce(tf.zeros(3))
    spans.stop("test")
    function(tf.zeros(3))  # records for as long as it lives
    content = spans.Content(IN_MESSAGES, "gradients average", 12, "allreduce")
    assert recorded(f"{PLAN.key}.0") == [content] * 3
    assert recorded(spans.OUTSIDE) == []


def test_what_runs_outside_of_steps_is_recorded_for_those_who_ask() -> None:
    spans.start("test")
    reduce(tf.zeros(3))
    spans.start("test", outside_steps=True)
    reader = Reader(spans.everything)
    np.testing.assert_array_equal(reduce(tf.constant([1.0, 2.0])), [1.0, 2.0])
    reduce(tf.zeros(3))
    content = spans.Content(IN_MESSAGES, "gradients average", 8, "allreduce")
    assert recorded(spans.OUTSIDE) == [content, spans.Content(IN_MESSAGES, "gradients average", 12, "allreduce")]
    assert spans.collectives() == {}
    assert [len(rows.table) for rows in reader.new().values()] == [2]


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_update_lasts_from_reduced_gradients_to_new_values(eagerly: bool) -> None:
    variable = tf.Variable([1.0, 2.0])
    slices = tf.IndexedSlices(tf.constant([5.0]), tf.constant([1]), tf.constant([2]))

    def apply(gradient: Any) -> None:
        with spans.update("Adam", [gradient, None, slices], [variable]):
            variable.assign_sub(gradient)

    step = apply if eagerly else tf.function(apply)
    step(tf.ones(2))
    assert spans.updates() == {}  # nobody records
    spans.start("test")
    step = apply if eagerly else tf.function(apply)
    for _ in range(3):
        step(tf.ones(2))
    assert variable.numpy().tolist() == [-3.0, -2.0]
    label = "the update of Adam"
    assert recorded(label)[-3:] == [spans.Content(label, "update", None, "update")] * 3
    assert "update" not in {track.content.operation for track in spans.collectives().values()}


def test_sessions_are_timed_whenever_they_run() -> None:
    spans.start("test", outside_steps=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.compat.v1.placeholder(tf.float32, [None])
        result = reduce(given)
        for count in (1, 2):
            assert session.run(result, {given: np.ones(count)}).tolist() == [1.0] * count
    assert [content.bytes for content in recorded(spans.OUTSIDE)] == [4, 8]
    assert spans.collectives() == {}


def test_an_engine_that_records_times_needs_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Records(Copies, RecordsTimes):
        def keep_times(self, key: str, capacity: int) -> bool:
            return True

        def times(self, key: str, capacity: int) -> tuple[Any, int]:
            return np.array([[1.0, 2.0]]), 7

    monkeypatch.setattr(Records, "__abstractmethods__", frozenset())
    spans.start("test")
    engine = Records()  # type: ignore[abstract]  # what it lacks is not called
    graph = tf.function(lambda tensor: reduce(tensor, engine)).get_concrete_function(tf.zeros(3)).graph
    assert {operation.type for operation in graph.get_operations()} == {"Placeholder", "Identity"}
    rows = spans.collectives()[f"{PLAN.key}.0"].rows()
    assert (rows.table.tolist(), rows.first) == ([[1.0, 2.0]], 7)
