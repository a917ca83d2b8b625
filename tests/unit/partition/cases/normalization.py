"""Softmax and losses of it, and normalization."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, indices, operation, real

CASES = {
    "Softmax": Case(tf.nn.softmax, [real(B, 3, 2 * B)]),
    "LogSoftmax": Case(tf.nn.log_softmax, [real(B, 3, 2 * B)]),
    "LogSoftmax of rows that are in the middle": Case(operation("LogSoftmax"), [real(3, B, 4)]),
    "Softmax over rows": Case(lambda a: tf.nn.softmax(a, 0), [real(B, 3)], gathers=True),
    "Softmax of single precision": Case(tf.nn.softmax, [real(B, 3, dtype="float32")]),
    "SoftmaxCrossEntropyWithLogits": Case(
        lambda a, b: list(tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=a, labels=tf.nn.softmax(b))),
        [real(B, B), real(B, B)],
    ),
    "SoftmaxCrossEntropyWithLogits of the same labels for all": Case(
        operation("SoftmaxCrossEntropyWithLogits"), [real(B, 3), real(1, 3)]
    ),
    "SparseSoftmaxCrossEntropyWithLogits": Case(
        operation("SparseSoftmaxCrossEntropyWithLogits"), [real(B, 4), indices(4, B)]
    ),
    "SparseSoftmaxCrossEntropyWithLogits of as many classes as rows": Case(
        operation("SparseSoftmaxCrossEntropyWithLogits"), [real(B, B), indices(1, B, dtype="int64")]
    ),
    "gradient of softmax": Case(gradients(tf.nn.softmax), [real(B, 3)]),
    "gradient of cross entropy": Case(
        gradients(lambda a, labels: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, a)),
        [real(B, 4), indices(4, B)],
    ),
}
