"""Integers that follow from shapes are those that TensorFlow computes, for all numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.partition import programs
from hvkeras.partition.integers import Integers, evaluate
from hvkeras.partition.sizes import Shape, rows, value_of

B = rows("rows")
SHAPE: Shape = (B, 3, B * 2)


def found(function: Callable[[Any], Any]) -> tuple[list[Integers | None], Any]:
    """Return what is known of the results of a function of a tensor, and the function."""
    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([None, 3, None]))
    program = programs.read(traced.graph)
    integers: dict[int, Integers | None] = {}
    shapes: dict[int, Shape | None] = dict.fromkeys(program.inputs, SHAPE)
    for node in program.nodes:
        results = evaluate(
            node.operation,
            [integers.get(number) for number in node.inputs],
            [shapes.get(number) for number in node.inputs],
        )
        integers.update(zip(node.outputs, results, strict=True))
    return [integers[number] for number in program.outputs], traced


@pytest.mark.parametrize(
    "function",
    [
        tf.shape,
        lambda x: tf.shape(x)[0] * 4 - tf.shape(x)[2] // 2,
        lambda x: tf.stack([tf.shape(x)[0], 7, tf.size(x)]),
        lambda x: tf.concat([tf.shape(x)[1:], [tf.rank(x)]], 0),
        lambda x: tf.reduce_prod(tf.shape(x)),
        lambda x: tf.reduce_sum(tf.shape(x)[:2], keepdims=True),
        lambda x: tf.maximum(tf.shape(x)[0] + 1, 1),
        lambda x: tf.minimum(tf.shape(x)[0], tf.shape(x)[2]),
        lambda x: tf.gather(tf.shape(x), [2, 0]),
        lambda x: tf.reverse(tf.shape(x), [0]),
        lambda x: tf.tile(tf.shape(x)[:1], [3]),
        lambda x: tf.reshape(tf.shape(x), [3, 1]),
        lambda x: tf.transpose(tf.expand_dims(tf.shape(x), 0)),
        lambda x: tf.where(tf.shape(x) > 2, tf.shape(x), tf.shape(x) * 0 + tf.shape(x)),
        lambda x: tf.cast(tf.shape(x), tf.int64) % 1,
        lambda x: tf.dynamic_stitch([[0, 2], [1]], [tf.shape(x)[:2], tf.shape(x)[2:]]),
        lambda x: tf.broadcast_dynamic_shape(tf.shape(x), [1, 1, 1]),
        lambda x: tf.split(tf.shape(x) + 1, 3),
        lambda x: tf.split(tf.shape(x), [1, -1, 0]),
        lambda x: tf.unstack(tf.shape(x)),
        lambda x: list(tf.raw_ops.ConcatOffset(concat_dim=0, shape=[tf.shape(x), tf.shape(x) * [2, 1, 1]])),
        lambda x: tf.fill([2], tf.shape(x)[0]),
        lambda x: tf.range(tf.shape(x)[1]),
        lambda x: tf.math.invert_permutation([2, 0, 1]) + tf.shape(x)[0] * 0,
        lambda x: tf.equal(tf.shape(x)[0] + 1, tf.shape(x)[0]),
    ],
)
def test_integers(function: Callable[[Any], Any]) -> None:
    known, traced = found(function)
    for number in (0, 1, 2, 7):
        right = tf.nest.flatten(traced(tf.zeros([number, 3, number * 2])))
        for integers, whole in zip(known, right, strict=True):
            assert integers is not None and integers.is_known
            values = [value_of(entry, {"rows": number}) for entry in integers.entries if entry is not None]
            np.testing.assert_array_equal(np.reshape(values, integers.shape), whole)


def test_axes_that_were_broadcast_do_not_depend_on_the_number_of_rows() -> None:
    (mine, its), _ = found(lambda x: list(tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=[3, 1])))
    assert mine == Integers((0,), ())  # with one row, TensorFlow also says 0, which changes nothing
    assert its == Integers((2,), (0, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.minimum(tf.shape(x)[0], 5),
        lambda x: tf.maximum(tf.shape(x)[0], 1),
        lambda x: tf.shape(x)[0] // 2,
        lambda x: tf.shape(x)[0] > 4,
        lambda x: tf.shape(x)[2] % 4,
        lambda x: tf.where(tf.shape(x)[0] > 4, 1, 2),
        lambda x: tf.reduce_max(tf.stack([tf.shape(x)[0], 3])),
        lambda x: tf.cast(x[0, 0, 0], tf.int32),
    ],
)
def test_what_differs_between_numbers_of_rows_is_not_known(function: Callable[[Any], Any]) -> None:
    (integers,), _ = found(function)
    assert integers is None or not integers.is_known
