"""Sparse and ragged tensors."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from unit.partition.brute_force import B, Case, indices, real
from unit.partition.cases.strings import texts

R = tf.raw_ops


def _matrix(places: tf.Tensor, values: tf.Tensor) -> tf.SparseTensor:
    return tf.SparseTensor(tf.cast(places, tf.int64), values, [4, 4])


WEIGHTS = np.arange(12.0).reshape(4, 3)

CASES = {
    "product of a sparse matrix": Case(
        lambda i, a, b: tf.sparse.sparse_dense_matmul(_matrix(i, a), b),
        [indices(4, B, 2), real(B), real(4, B)],
        gathers=True,
    ),
    "product of transposed matrices": Case(
        lambda i, a, b: tf.sparse.sparse_dense_matmul(_matrix(i, a), b, adjoint_a=True, adjoint_b=True),
        [indices(4, B, 2), real(B), real(B, 4)],
        gathers=True,
    ),
    "gradient of a product": Case(
        lambda i, a, b: tf.gradients(tf.reduce_sum(tf.sparse.sparse_dense_matmul(_matrix(i, a), b) ** 2), [a, b]),
        [indices(4, B, 2), real(B), real(4, 3)],
    ),
    "sparse times dense": Case(lambda i, a, b: (_matrix(i, a) * b).values, [indices(4, B, 2), real(B), real(4, 4)]),
    "sparse over dense": Case(
        lambda i, a, b: (_matrix(i, a) / (b + 9)).values, [indices(4, B, 2), real(B), real(4, 4)]
    ),
    "sparse and dense": Case(
        lambda i, a, b: R.SparseDenseCwiseAdd(
            sp_indices=tf.cast(i, tf.int64), sp_values=a, sp_shape=tf.constant([4, 4], tf.int64), dense=b
        ),
        [indices(4, B, 2), real(B), real(4, 4)],
    ),
    "loss of sparse rows": Case(
        lambda i, a, y: tf.gradients(
            tf.reduce_mean(
                (
                    tf.sparse.sparse_dense_matmul(
                        tf.SparseTensor(tf.cast(i, tf.int64), a, [tf.shape(y, out_type=tf.int64)[0], 4]), WEIGHTS
                    )
                    - y
                )
                ** 2
            ),
            a,
        ),
        [indices(1, 5, 2), real(5), real(B, 3)],
        gathers=True,
    ),
    "dense of sparse": Case(
        lambda a: (
            2
            * tf.sparse.to_dense(
                tf.SparseTensor(tf.where(a > 0), tf.boolean_mask(a, a > 0), tf.shape(a, out_type=tf.int64))
            )
        ),
        [real(B, B)],
        gathers=True,
    ),
    "dense of ragged": Case(
        lambda a, n: 2 * tf.RaggedTensor.from_tensor(a, n).to_tensor(), [real(B, 4), indices(4, B)], gathers=True
    ),
    "ragged in ragged": Case(
        lambda a: 2 * tf.RaggedTensor.from_tensor(a, ragged_rank=2).to_tensor(shape=[None, 2, None]),
        [real(B, 3, 4)],
        gathers=True,
    ),
    "cross": Case(
        lambda a, b: tf.sparse.to_dense(tf.sparse.cross([a, b]), "")[:, :1], [texts(B, 2), texts(B, 1)], gathers=True
    ),
    "hashed cross": Case(
        lambda a, b: tf.sparse.to_dense(tf.sparse.cross_hashed([a, b], 9)), [texts(B, 2), texts(B, 1)], gathers=True
    ),
    "new cross": Case(
        lambda a, b: list(R.SparseCrossV2(indices=[], values=[], shapes=[], dense_inputs=[a, b], sep=tf.fill([], "x"))),
        [texts(B, 1), texts(B, 3)],
        gathers=True,
    ),
    "new hashed cross": Case(
        lambda a, b: list(
            R.SparseCrossHashed(
                indices=[],
                values=[],
                shapes=[],
                dense_inputs=[a, b],
                num_buckets=tf.constant(9, tf.int64),
                strong_hash=False,
                salt=tf.constant([1, 2], tf.int64),
            )
        ),
        [texts(B, 1), texts(B, 3)],
        gathers=True,
    ),
}
