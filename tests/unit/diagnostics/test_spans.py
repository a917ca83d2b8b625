"""Where the times of a collective are recorded, by how it runs and who asks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.backends.capabilities import RecordsTimes
from hvkeras.diagnostics import spans
from hvkeras.diagnostics.ring_buffer import RingReader
from hvkeras.diagnostics.spans import SpanStore
from hvkeras.job.plans import Plan

PLAN = Plan.of("gradients", [tf.zeros(3)], (0, 1), "the gradients of a test", how="average")
IN_MESSAGES = "the gradients of a test, part 0"


@pytest.fixture
def store() -> SpanStore:
    return SpanStore()


class Copies:
    """A backend that returns its input."""

    def allreduce(self, tensors: Sequence[Any], _: str) -> list[Any]:
        return [tf.identity(tensor) for tensor in tensors]


def reduce(store: SpanStore, tensor: Any, backend: Any = None) -> Any:
    [result] = store.timed(backend or Copies(), PLAN).allreduce([tensor], f"{PLAN.key}.0")
    return result


def recorded(store: SpanStore, track: str) -> list[spans.Content]:
    if track == spans.OUTSIDE:
        ran = list(store.runs_outside(store.outside.rows()))
        assert all(began <= ended for _, began, ended in ran)
        return [spans.Content(**content) for content, _, _ in ran]
    found = {**store.collectives(), **store.updates()}[track]
    assert isinstance(found, spans.Collective)
    table = found.rows().table
    assert (table[:, 0] <= table[:, 1]).all()
    return [found.content] * len(table)


def test_nothing_is_added_while_nobody_records(store: SpanStore) -> None:
    backend: Any = Copies()
    assert store.timed(backend, PLAN) is backend
    with store.in_step():
        assert store.timed(backend, PLAN) is backend
    graph = tf.function(functools.partial(reduce, store)).get_concrete_function(tf.zeros(3)).graph
    assert {operation.type for operation in graph.get_operations()} == {"Placeholder", "Identity"}


@pytest.mark.parametrize("outside_steps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_functions_and_eager_steps_share_a_track(outside_steps: bool, store: SpanStore) -> None:
    store.start("test", outside_steps)
    function = tf.function(functools.partial(reduce, store))
    function(tf.zeros(3))
    with store.in_step():
        reduce(store, tf.zeros(3))
    store.stop("test")
    function(tf.zeros(3))  # records for as long as it lives
    content = spans.Content(IN_MESSAGES, "gradients", 12, "allreduce", "average")
    assert recorded(store, f"{PLAN.key}.0") == [content] * 3
    assert recorded(store, spans.OUTSIDE) == []


def test_what_runs_outside_of_steps_is_recorded_for_those_who_ask(store: SpanStore) -> None:
    store.start("test")
    reduce(store, tf.zeros(3))
    store.start("test", outside_steps=True)
    reader = RingReader(lambda: {**store.collectives(), spans.OUTSIDE: store.outside})
    np.testing.assert_array_equal(reduce(store, tf.constant([1.0, 2.0])), [1.0, 2.0])
    reduce(store, tf.zeros(3))
    content = spans.Content(IN_MESSAGES, "gradients", 8, "allreduce", "average")
    larger = spans.Content(IN_MESSAGES, "gradients", 12, "allreduce", "average")
    assert recorded(store, spans.OUTSIDE) == [content, larger]
    assert store.collectives() == {}
    assert [len(rows.table) for rows in reader.new().values()] == [2]


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_update_lasts_from_reduced_gradients_to_new_values(eagerly: bool, store: SpanStore) -> None:
    variable = tf.Variable([1.0, 2.0])
    slices = tf.IndexedSlices(tf.constant([5.0]), tf.constant([1]), tf.constant([2]))

    def apply(gradient: Any) -> None:
        with store.update("Adam", [gradient, None, slices], [variable]):
            variable.assign_sub(gradient)

    step = apply if eagerly else tf.function(apply)
    step(tf.ones(2))
    assert store.updates() == {}  # nobody records
    store.start("test")
    step = apply if eagerly else tf.function(apply)
    for _ in range(3):
        step(tf.ones(2))
    assert variable.numpy().tolist() == [-3.0, -2.0]
    label = "the update of Adam"
    assert recorded(store, label)[-3:] == [spans.Content(label, "update", None, "update")] * 3
    assert "update" not in {track.content.operation for track in store.collectives().values()}


def test_sessions_are_timed_whenever_they_run(store: SpanStore) -> None:
    store.start("test", outside_steps=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.compat.v1.placeholder(tf.float32, [None])
        result = reduce(store, given)
        for count in (1, 2):
            assert session.run(result, {given: np.ones(count)}).tolist() == [1.0] * count
    assert [content.bytes for content in recorded(store, spans.OUTSIDE)] == [4, 8]
    assert store.collectives() == {}


def test_an_engine_that_records_times_needs_no_operations(monkeypatch: pytest.MonkeyPatch, store: SpanStore) -> None:
    class Records(Copies, RecordsTimes):
        def keep_times(self, key: str, capacity: int) -> bool:
            return True

        def times(self, key: str, capacity: int) -> tuple[Any, int]:
            return np.array([[1.0, 2.0]]), 7

    monkeypatch.setattr(Records, "__abstractmethods__", frozenset())
    store.start("test")
    engine = Records()  # type: ignore[abstract]  # what it lacks is not called
    graph = tf.function(lambda tensor: reduce(store, tensor, engine)).get_concrete_function(tf.zeros(3)).graph
    assert {operation.type for operation in graph.get_operations()} == {"Placeholder", "Identity"}
    rows = store.collectives()[f"{PLAN.key}.0"].rows()
    assert (rows.table.tolist(), rows.first) == ([[1.0, 2.0]], 7)
