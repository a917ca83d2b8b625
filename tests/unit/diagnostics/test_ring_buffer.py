"""Tables that graphs append to, in the native library or in TensorFlow's variables; what Python appends; readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.backends.cpp_library import objection
from hvkeras.diagnostics.ring_buffer import NativeRing, PythonRing, Ring, RingReader, Rows, concatenate, ring

KINDS = [Ring, pytest.param(NativeRing, marks=pytest.mark.skipif(bool(objection()), reason=objection() or "-"))]


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest) -> Any:
    return request.param("test", 2, 3)


@pytest.fixture(params=["eager", "function", "loop"])
def append(request: pytest.FixtureRequest, made: Any) -> Callable[[float, int], None]:
    def plain(number: float, count: int = 1) -> None:
        made.append([tf.constant(number, tf.float64), tf.constant(-number, tf.float64)], tf.constant(count, tf.int64))

    @tf.function
    def function(number: Any, count: Any) -> None:
        made.append([number, -number], count)

    @tf.function
    def loop(number: Any, count: Any) -> None:
        for _ in tf.range(1):
            made.append([number, -number], count)

    in_graph = {"function": function, "loop": loop}.get(request.param)
    if in_graph is None:
        return plain
    return lambda number, count=1: in_graph(tf.constant(number, tf.float64), tf.constant(count, tf.int64))


def test_the_latest_rows_are_kept_with_the_number_of_the_first(made: Any, append: Callable[..., None]) -> None:
    rows, first = made.rows()
    assert (rows.shape, first) == ((0, 2), 0)
    for number in range(2):
        append(float(number))
    rows, first = made.rows()
    np.testing.assert_array_equal(rows, [[0, 0], [1, -1]])
    assert first == 0
    for number in range(2, 8):
        append(float(number))
    rows, first = made.rows()
    np.testing.assert_array_equal(rows, [[5, -5], [6, -6], [7, -7]])
    assert first == 5
    rows, first = made.rows(7)
    np.testing.assert_array_equal(rows, [[7, -7]])
    assert first == 7


def test_a_row_of_count_0_is_not_kept(made: Any, append: Callable[..., None]) -> None:
    append(1.0)
    append(2.0, 0)
    append(3.0)
    np.testing.assert_array_equal(made.rows()[0], [[1, -1], [3, -3]])


def test_tables_of_one_name_are_two() -> None:
    one, other = ring("same", 1, 4), ring("same", 1, 4)
    one.append([tf.constant(1.0, tf.float64)])
    assert (len(one.rows()[0]), len(other.rows()[0])) == (1, 0)


def test_what_python_appends_is_read_alike() -> None:
    table = PythonRing(2, 3)
    rows, first = table.rows()
    assert (rows.shape, first) == ((0, 2), 0)
    for number in range(5):
        table.append(number, -number)
    rows, first = table.rows()
    np.testing.assert_array_equal(rows, [[2, -2], [3, -3], [4, -4]])
    assert first == 2
    assert [(len(table.rows(since).table), table.rows(since).first) for since in (1, 4, 5, 6)] == [
        (3, 2), (1, 4), (0, 5), (0, 5)]


def test_rows_know_their_numbers() -> None:
    rows = Rows(np.arange(3.0)[:, None], 5)
    assert rows.after == 8
    assert [(part.table.ravel().tolist(), part.first) for part in map(rows.since, (0, 5, 7, 9))] == [
        ([0.0, 1.0, 2.0], 5), ([0.0, 1.0, 2.0], 5), ([2.0], 7), ([], 8)]
    assert concatenate([rows, Rows(np.array([[3.0]]), 8)]).first == 5


def test_a_reader_reads_each_row_once_and_counts_what_it_missed() -> None:
    tracks = {"old": PythonRing(1, 3)}
    tracks["old"].append(0)
    reader, from_the_start = RingReader(lambda: tracks), RingReader(lambda: tracks, {})

    def new(reader: RingReader) -> dict[str, list[float]]:
        return {name: rows.table.ravel().tolist() for name, rows in reader.new().items()}

    assert (new(reader), new(from_the_start)) == ({"old": []}, {"old": [0.0]})
    tracks["new"] = PythonRing(1, 3)
    for number in range(1, 6):
        tracks["new"].append(number)
    tracks["old"].append(6)
    assert new(reader) == new(from_the_start) == {"old": [6.0], "new": [3.0, 4.0, 5.0]}
    assert (reader.lost, from_the_start.lost) == (2, 2)
    assert new(reader) == {"old": [], "new": []}
