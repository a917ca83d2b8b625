"""Tensors that are repeated to meet others, element by element, whose copies need not be made."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, real


def _column(a, b):
    """Repeat a row of sums over the rows of `a` for each row of `b`."""
    return tf.tile(tf.reduce_sum(a, 0, keepdims=True), [tf.shape(b)[0], 1])


def _row(a, columns):
    return tf.broadcast_to(tf.reduce_sum(a, 1, keepdims=True), [tf.shape(a)[0], columns])


def _moments(a):
    mean, variance = tf.nn.moments(a, [0, 1], keepdims=True)
    return (a - mean) * tf.math.rsqrt(variance + 1)


CASES = {
    "product with copies of a row": Case(lambda a, b: _column(a, b) / 4 * b, [real(B, 3), real(B, 3)]),
    "product with copies of a column": Case(lambda a: a * (2 * _row(a, 4)), [real(B, 4)]),
    "copies that meet numbers": Case(
        lambda a, b: [-_column(a, b) * 0.5 - b, b - 1 / (1 + tf.square(b)) + tf.cast(_column(a, b), b.dtype) / 2],
        [real(B, 3), real(B, 3)],
    ),
    "copies that meet copies": Case(
        lambda a, b: [_column(a, b) * _row(b, 3), _column(a, b) + _column(b, b) * b], [real(B, 3), real(B, 3)]
    ),
    "copies that are a result as well": Case(
        lambda a, b: [copies := _column(a, b), copies / 2, copies / 2 * b], [real(B, 3), real(B, 3)]
    ),
    "copies of which one use is of another kind": Case(
        lambda a, b: [(copies := _column(a, b)) / 2 * b, tf.sort(copies / 2)], [real(B, 3), real(B, 3)]
    ),
    "sum of copies and others": Case(
        lambda a, b: tf.add_n([_column(a, b), b * b, _row(b, 3) / 2, b]), [real(B, 3), real(B, 3)]
    ),
    "sum of copies": Case(lambda a, b: tf.add_n([_column(a, b), _row(b, 3)]), [real(B, 3), real(B, 3)]),
    "copies that meet what broadcasts": Case(
        lambda a, b: [_column(a, b) * tf.constant([1.0, 2.0, 3.0], tf.float64), _column(a, b) * b[:, :1]],
        [real(B, 3), real(B, 3)],
    ),
    "copies of a number": Case(
        lambda a: tf.fill(tf.shape(a), tf.reduce_sum(a)) * a
        + tf.tile(tf.reshape(tf.reduce_sum(a), [1, 1]), tf.shape(a)) * a,
        [real(B, 3)],
    ),
    "copies with a new dimension": Case(
        lambda a, b: tf.broadcast_to(tf.reduce_sum(a, 0), tf.shape(b)) / 2 * b, [real(B, 3), real(B, 3)]
    ),
    "copies of rows of copies": Case(
        lambda a: tf.tile(tf.tile(a[:, :, None], [1, 1, 2])[:, :, :1], [1, 1, 3]) * a[:, :, None], [real(B, 2)]
    ),
    "columns of rows": Case(
        lambda a: tf.tile(a[:, None], [1, tf.shape(a)[0]]) * (a[None] - a[:, None]), [real(B)], gathers=True
    ),
    "gradient of moments": Case(gradients(_moments), [real(B, 2, 3)]),
    "gradient of a mean of rows": Case(
        gradients(lambda a: a * tf.reduce_mean(tf.square(a), 1, keepdims=True)), [real(B, 4)]
    ),
    "gradient of a mean over rows": Case(
        gradients(lambda a: a * tf.reduce_mean(tf.square(a), 0, keepdims=True)), [real(B, 4)]
    ),
}
