"""State, checks and effects of a function whose rows are divided among ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from unit.partition.ranks import Ranks, same

ROWS = tf.TensorSpec([None, 2], tf.float64)
VALUES = np.arange(14.0).reshape(7, 2)


@pytest.mark.parametrize(("effects", "times"), [("all", 3), ("first", 1)])
@pytest.mark.parametrize("separate", [False, True])
def test_python_functions_see_all_rows_on_the_ranks_that_the_caller_chose(effects: str, times: int, separate: bool):
    seen: list[Any] = []

    def every_second(rows: Any) -> Any:
        seen.append(rows.numpy())
        return rows[::2], tf.constant([b"a", b"b"]), rows[0, 0] > 1

    def function(rows: tf.Tensor) -> Any:
        half, texts, truth = tf.py_function(every_second, [rows * 2], [tf.float64, tf.string, tf.bool])
        return half, tf.strings.join([texts, "!"]), truth, tf.reduce_sum(half) + tf.reduce_sum(rows)

    ranks = Ranks(function, [ROWS], separate=separate, effects=effects)
    for results in ranks.run(VALUES):
        same(results[0], VALUES[::2] * 2)
        same(results[1], [b"a!", b"b!"])
        same(results[2], False)
        same(results[3], VALUES[::2].sum() * 2 + VALUES.sum())
    assert len(seen) == times
    assert all((rows == VALUES * 2).all() for rows in seen)


@pytest.mark.parametrize(("effects", "times"), [("all", 3), ("first", 1)])
def test_what_is_printed_and_written(effects: str, times: int, capfd: pytest.CaptureFixture[str], tmp_path: Any):
    writer = tf.summary.create_file_writer(str(tmp_path / "events"))

    def function(rows: tf.Tensor) -> Any:
        tf.print("mean", tf.reduce_mean(rows), rows, summarize=-1)
        tf.io.write_file(str(tmp_path / "written"), tf.strings.as_string(tf.reduce_max(rows)))
        with writer.as_default(step=1):
            tf.summary.write("loss", tf.reduce_sum(rows))
        return rows + 1

    ranks = Ranks(function, [ROWS], effects=effects)
    capfd.readouterr()
    for results in ranks.run(VALUES):
        same(results[0], VALUES + 1)
    writer.flush()
    lines = capfd.readouterr().err
    assert len(re.findall(r"mean 6\.5", lines)) == times
    assert len(re.findall(r"\[12 13\]", lines)) == times
    assert (tmp_path / "written").read_text() == "13.000000"
    events = [
        event for path in (tmp_path / "events").iterdir() for event in tf.compat.v1.train.summary_iterator(str(path))
    ]
    assert [float(tf.make_ndarray(value.tensor)) for event in events for value in event.summary.value] == [91.0] * times


@pytest.mark.parametrize("effects", ["all", "first"])
def test_effects_in_branches_and_loops(effects: str):
    seen: list[Any] = []

    def log(number: Any) -> Any:
        seen.append(float(number))
        return number + 1

    def function(rows: tf.Tensor) -> Any:
        total = tf.reduce_sum(rows)
        for _ in tf.range(2):
            if total > 0:
                total = tf.ensure_shape(tf.py_function(log, [total], tf.float64), [])
        return total + rows

    for results in Ranks(function, [ROWS], size=2, separate=True, effects=effects).run(VALUES):
        same(results[0], VALUES + 93)
    assert sorted(seen) == sorted([91.0, 92.0] * (1 if effects == "first" else 2))


def test_a_rank_that_does_not_print_keeps_the_order():
    state = tf.Variable(0.0, dtype=tf.float64)

    def function(rows: tf.Tensor) -> Any:
        products = tf.linalg.matmul(rows, rows, transpose_b=True)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_min(products) < 0, ["?"])]):
            printed = tf.print("", end="")
        with tf.control_dependencies([tf.group(printed)]):
            state.assign(1.0)
        return rows

    ranks = Ranks(function, [ROWS], separate=True, effects="first")
    for error in ranks.run(-VALUES):
        assert isinstance(error, tf.errors.InvalidArgumentError)
    assert [float(variable) for variable in ranks.variables[0]] == [0.0] * 4


def test_a_result_that_only_orders_others_keeps_the_order():
    state = tf.Variable(0.0, dtype=tf.float64)

    def function(rows: tf.Tensor) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_min(rows) > 0, ["?"])]):
            checked = tf.identity(tf.reduce_max(rows))
        with tf.control_dependencies([checked]):
            state.assign(1.0)
        return rows

    ranks = Ranks(function, [ROWS])
    with pytest.raises(tf.errors.InvalidArgumentError):
        ranks.run(-VALUES)
    assert [float(variable) for variable in ranks.variables[0]] == [0.0] * 4


@pytest.mark.parametrize(
    "check",
    [
        lambda rows: tf.debugging.assert_non_negative(rows, "rows must not be negative"),
        lambda rows: tf.debugging.Assert(tf.reduce_all(rows >= 0), ["rows must not be negative"]),
    ],
)
def test_a_failing_assertion_fails_on_every_rank(check: Callable[[tf.Tensor], Any]):
    def function(rows: tf.Tensor) -> Any:
        check(rows)
        total = tf.reduce_sum(rows)
        return total, tf.linalg.matmul(rows, rows, transpose_b=True), tf.reduce_max(total * rows)

    ranks = Ranks(function, [ROWS], separate=True)
    ranks.check(VALUES)
    for rows in (VALUES - 13, VALUES * np.where(np.arange(7) < 6, 1, -1)[:, None]):
        for error in ranks.run(rows):
            assert isinstance(error, tf.errors.InvalidArgumentError)
            assert "rows must not be negative" in str(error)


def of_condition(rows: tf.Tensor) -> Any:
    tf.debugging.Assert(tf.reduce_all(rows < 13), ["too large:", rows, tf.reduce_sum(rows)])
    return rows


def of_index(rows: tf.Tensor) -> Any:
    return tf.gather(tf.constant([1.0, 2.0]), tf.cast(rows, tf.int32) + 3)


def of_shape(rows: tf.Tensor) -> Any:
    return tf.reshape(rows, [tf.shape(rows)[0], 3])


def of_branch(rows: tf.Tensor) -> Any:
    if tf.reduce_sum(rows) > 0:
        rows = rows + tf.cast(of_index(rows), tf.float64)
    return rows


def of_loop(rows: tf.Tensor) -> Any:
    for _ in tf.range(2):
        rows = of_condition(rows)
    return rows


@tf.function
def nested(rows: tf.Tensor) -> Any:
    return of_index(rows) * 2


def of_function(rows: tf.Tensor) -> Any:
    return nested(rows) + 1


def of_python(rows: tf.Tensor) -> Any:
    def fail(rows: Any) -> Any:
        raise ValueError(f"of the user: {len(rows)} rows")

    return tf.py_function(fail, [rows], tf.float64)


def places(error: BaseException) -> list[str]:
    """Return the lines of this file, with its functions, that an error shows."""
    return re.findall(rf'File "{re.escape(__file__)}", line \d+, in of_\w+|nested', str(error))


@pytest.mark.oldest
@pytest.mark.parametrize("function", [of_condition, of_index, of_shape, of_branch, of_loop, of_function, of_python])
def test_an_error_shows_the_line_of_the_user(function: Callable[..., Any]):
    ranks = Ranks(function, [ROWS], size=2)
    with pytest.raises(tf.errors.OpError) as original:
        ranks.whole(tf.constant(VALUES))
    with pytest.raises(type(original.value)) as error:
        ranks.run(VALUES)
    assert places(original.value)
    assert places(error.value) == places(original.value)


@pytest.mark.oldest
def test_names_and_devices_are_kept():
    def function(rows: tf.Tensor) -> Any:
        with tf.device("/device:CPU:0"), tf.name_scope("mine"):
            return tf.sin(rows, name="wave")

    ranks = Ranks(function, [ROWS], size=2)
    made = [operation for operation in ranks._functions[0].graph.get_operations() if operation.type == "Sin"]
    assert [operation.name for operation in made] == ["mine/wave", "mine/wave_1"]
    assert all("CPU:0" in operation.device for operation in made)
