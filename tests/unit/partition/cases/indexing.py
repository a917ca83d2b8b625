"""Taking elements by indices, and adding elements at indices."""

from __future__ import annotations

import functools

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, indices, integers, operation, real

R = tf.raw_ops


@functools.cache
def variable() -> tf.Variable:
    """Return a variable of 5 rows."""
    with tf.init_scope():
        return tf.Variable(tf.reshape(tf.range(15, dtype=tf.float64), [5, 3]))


CASES = {
    "TopKV2": Case(lambda a: list(tf.math.top_k(a, 2)), [real(B, B * 2, 4)]),
    "TopKV2 of rows": Case(lambda a: list(tf.math.top_k(a, 1)), [real(2, B)], gathers=True),
    "TopKV2, not sorted": Case(lambda a: list(tf.math.top_k(a, 4, sorted=False)), [real(B, 4)]),
    "InTopKV2": Case(
        lambda a, i: R.InTopKV2(predictions=a, targets=i, k=2), [real(B, 4, dtype="float32"), indices(4, B)]
    ),
    "NthElement": Case(lambda a: R.NthElement(input=a, n=1, reverse=True), [real(B, 2 * B, 3)]),
    "Bucketize": Case(operation("Bucketize", boundaries=[-1.0, 0.0, 2.0]), [real(B, 2 * B)]),
    "LowerBound": Case(lambda a, b: R.LowerBound(sorted_inputs=tf.sort(a, 1), values=b), [real(B, 3), real(B, 2 * B)]),
    "UpperBound": Case(lambda a, b: R.UpperBound(sorted_inputs=tf.sort(a, 1), values=b), [real(B, 3), real(B, 2 * B)]),
    **{
        f"{type_} along {axis}": Case(operation(type_, dimension=axis), [real(B, 3, 2 * B)], gathers=axis == 0)
        for type_ in ("ArgMax", "ArgMin")
        for axis in (0, 1, -1)
    },
    **{
        f"{type_} along {axis}{', exclusive' if exclusive else ''}{', reverse' if reverse else ''}": Case(
            operation(type_, axis=axis, exclusive=exclusive, reverse=reverse), [real(B, 3, B)], gathers=axis == 0
        )
        for type_ in ("Cumsum", "Cumprod", "CumulativeLogsumexp")
        for axis, exclusive, reverse in ((0, False, False), (1, True, False), (-1, False, True))
    },
    **{
        f"ReverseV2 of {axes}": Case(operation("ReverseV2", axis=axes), [real(B, 2, 2 * B)], gathers=0 in axes)
        for axes in ([0], [1], [-1, 1], [0, 2])
    },
    **{
        f"Roll of {axes}": Case(
            operation("Roll", shift=[1, -2][: len(axes)], axis=axes), [real(B, 3, 2 * B)], gathers=0 in axes
        )
        for axes in ([0], [1], [-1], [1, 2])
    },
    **{
        f"OneHot, axis {axis}": Case(
            lambda i, axis=axis: tf.one_hot(i, 4, 2.0, -1.0, axis, tf.float64), [indices(5, B, 2, B)]
        )
        for axis in (-1, 0, 1)
    },
    "GatherV2 of constant rows": Case(tf.gather, [real(4, B), indices(4, 2 * B, 2)], gathers=True),
    "GatherV2 by indices of rows": Case(tf.gather, [real(4, 3), indices(4, B, 2)]),
    "GatherV2 along columns": Case(lambda a, i: tf.gather(a, i, axis=1), [real(B, 4, 2), indices(4, 3)]),
    "GatherV2 along the last axis": Case(
        lambda a, i: tf.gather(a, i, axis=-1), [real(B, 4), indices(4, B)], gathers=True
    ),
    "GatherV2 with batches": Case(lambda a, i: tf.gather(a, i, batch_dims=1), [real(B, 4, B), indices(4, B, 3)]),
    "GatherV2 with batches along a further axis": Case(
        lambda a, i: tf.gather(a, i, axis=2, batch_dims=1), [real(B, 2, 4), indices(4, B, 3)]
    ),
    "GatherV2 with batches from behind": Case(
        lambda a, i: tf.gather(a, i, batch_dims=-1), [real(B, 4), indices(4, B, 3)]
    ),
    "GatherV2 of rows by rows": Case(tf.gather, [real(B, 3), indices(1, B)], gathers=True),
    "GatherV2 by a scalar": Case(lambda a, i: tf.gather(a, i, axis=1), [real(B, 4), indices(4)]),
    "ResourceGather": Case(
        lambda i: R.ResourceGather(resource=variable().handle, indices=i, dtype=tf.float64), [indices(5, B, 2 * B)]
    ),
    "GatherNd": Case(tf.gather_nd, [real(3, 2, B), indices(2, 2 * B, 2)], gathers=True),
    "GatherNd of all axes": Case(tf.gather_nd, [real(3, 2), indices(2, B, 2, 2)]),
    "GatherNd of rows": Case(tf.gather_nd, [real(B, 3), indices(1, B, 1)], gathers=True),
    "ScatterNd": Case(lambda i, u: tf.scatter_nd(i, u, [5, 3]), [indices(5, B, 1), real(B, 3)]),
    "ScatterNd of columns": Case(lambda i, u: tf.scatter_nd(i, u, [5, tf.shape(u)[1]]), [indices(5, 3, 1), real(3, B)]),
    "ScatterNd of elements": Case(lambda i, u: tf.scatter_nd(i, u, [3, 2]), [indices(2, B, 2), real(B)]),
    "ScatterNd into rows": Case(lambda i, u: tf.scatter_nd(i, u, [tf.shape(u)[0], 2]), [indices(1, B, 1), real(B, 2)]),
    **{
        type_: Case(lambda a, i, type_=type_: operation(type_)(a, i, 4), [real(B, 2 * B), indices(4, B)])
        for type_ in ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin")
    },
    "UnsortedSegmentSum of elements": Case(
        lambda a, i: R.UnsortedSegmentSum(data=a, segment_ids=i, num_segments=4), [real(B, 2, B), indices(4, B, 2)]
    ),
    "UnsortedSegmentSum of integers": Case(
        lambda a, i: R.UnsortedSegmentSum(data=a, segment_ids=i, num_segments=3), [integers(B, 2), indices(3, B)]
    ),
    "UnsortedSegmentSum into rows": Case(
        lambda a, i: R.UnsortedSegmentSum(data=a, segment_ids=i, num_segments=tf.shape(a)[0]),
        [real(B, 2), indices(1, B)],
    ),
    "UnsortedSegmentSum of a number at run time": Case(
        lambda a, i: R.UnsortedSegmentSum(data=a, segment_ids=i, num_segments=tf.reduce_max(i) + 1),
        [real(B, 2), indices(4, B)],
    ),
    "UnsortedSegmentProd": Case(
        lambda a, i: R.UnsortedSegmentProd(data=a, segment_ids=i, num_segments=4), [real(5, 2 * B), indices(4, 5)]
    ),
    **{
        type_: Case(lambda a, i, type_=type_: operation(type_)(a, tf.sort(i)), [real(5, 2 * B), indices(4, 5)])
        for type_ in ("SegmentMax", "SegmentMean", "SegmentMin", "SegmentProd", "SegmentSum")
    },
    **{
        type_: Case(operation(type_), [real(3, 2, 2 * B), indices(2, 4, 2), real(4, 2 * B)])
        for type_ in ("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub")
    },
    "TensorScatterUpdate": Case(
        lambda a, u: tf.tensor_scatter_nd_update(a, [[[2], [0]]], u), [real(3, B), real(1, 2, B)]
    ),
    "TensorScatterUpdate of rows": Case(
        tf.tensor_scatter_nd_update, [real(B, 2), indices(1, 1, 1), real(1, 2)], gathers=True
    ),
    "TensorScatterAdd by rows": Case(
        tf.tensor_scatter_nd_add, [real(5, 2), indices(5, B, 1), real(B, 2)], gathers=True
    ),
    "ReverseSequence": Case(operation("ReverseSequence", seq_dim=1), [real(B, 4, 2 * B), indices(5, B)]),
    "ReverseSequence along the first axis": Case(
        operation("ReverseSequence", seq_dim=0, batch_dim=1), [real(4, B, 2), indices(5, B)]
    ),
    "Bincount": Case(lambda i, a: R.Bincount(arr=i, size=4, weights=a), [indices(6, B, 2 * B), real(B, 2 * B)]),
    "Bincount without weights": Case(lambda i: R.Bincount(arr=i, size=4, weights=tf.zeros([0])), [indices(6, B, 2)]),
    "DenseBincount": Case(lambda i, a: R.DenseBincount(input=i, size=4, weights=a), [indices(6, B), real(B)]),
    "DenseBincount of rows": Case(
        lambda i, a: R.DenseBincount(input=i, size=4, weights=a), [indices(6, B, 3), real(B, 3)]
    ),
    **{
        f"DenseBincount of {len(shape)} dimensions{', binary' if binary else ''}": Case(
            lambda i, binary=binary: R.DenseBincount(input=i, size=4, weights=tf.zeros([0]), binary_output=binary),
            [indices(6, *shape)],
        )
        for shape in ((B,), (B, 3))
        for binary in (False, True)
    },
    "Unique": Case(
        lambda i, a: [*tf.unique(i), a * tf.cast(tf.unique(i).idx, a.dtype)], [indices(4, B), real(B)], gathers=True
    ),
    "UniqueV2": Case(lambda i: list(R.UniqueV2(x=i, axis=[0])), [indices(3, B, 2)], gathers=True),
    "UniqueWithCounts": Case(lambda i: list(tf.unique_with_counts(i)), [indices(4, B)], gathers=True),
    "UniqueWithCountsV2": Case(lambda i: list(R.UniqueWithCountsV2(x=i, axis=[0])), [indices(3, B, 2)], gathers=True),
    "rows in another order": Case(lambda a, b: tf.gather(a, tf.argsort(b)) * a, [real(B, 2), real(B)], gathers=True),
    "gradient of an embedding": Case(gradients(tf.gather), [real(5, 3), indices(5, B, 2)]),
    "gradient of a variable's embedding": Case(
        lambda i: tf.convert_to_tensor(tf.gradients(tf.reduce_sum(tf.gather(variable(), i) ** 2), variable())[0]),
        [indices(5, B, 2)],
    ),
    "gradient of top k": Case(gradients(lambda a: tf.math.top_k(a, 2).values), [real(B, 4)]),
    "gradient of elements": Case(gradients(lambda a, i: tf.gather(a, i, batch_dims=1)), [real(B, 4), indices(4, B, 3)]),
    "gradient of a cumulative sum": Case(gradients(lambda a: tf.cumsum(a, 1)), [real(B, 4)]),
}
