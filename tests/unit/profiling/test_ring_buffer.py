"""Tables that graphs append to: in the native library, and in TensorFlow's variables where that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.library.loading import objection
from hvkeras.profiling.ring_buffer import NativeRing, Ring, ring

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


def test_a_row_of_count_0_is_not_kept(made: Any, append: Callable[..., None]) -> None:
    append(1.0)
    append(2.0, 0)
    append(3.0)
    np.testing.assert_array_equal(made.rows()[0], [[1, -1], [3, -3]])


def test_tables_of_one_name_are_two() -> None:
    one, other = ring("same", 1, 4), ring("same", 1, 4)
    one.append([tf.constant(1.0, tf.float64)])
    assert (len(one.rows()[0]), len(other.rows()[0])) == (1, 0)
