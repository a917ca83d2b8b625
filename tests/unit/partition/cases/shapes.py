"""Operations that change shapes, or join, cut and repeat tensors."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, Operand, between, gradients, indices, integers, operation, real

R = tf.raw_ops


def _rows(tensor):
    return tf.shape(tensor)[0]


_ONE_TO_THREE = Operand((), lambda generator, _shape: generator.integers(1, 4, dtype="int32"))
_UNKNOWN = {
    "Shape": tf.shape,
    "ShapeN": lambda a: R.ShapeN(input=[a, a * 2]),
    "Reshape": lambda a: tf.reshape(a, [_rows(a), -1, 1]),
    "Reshape to a vector": lambda a: tf.reshape(a, [-1]),
    "Transpose": tf.transpose,
    "ConcatV2 of rows": lambda a: tf.concat([a, a + 1], 0),
    "ConcatV2 of columns": lambda a: tf.concat([a, a + 1], 1),
    "Tile": lambda a: tf.tile(a, [2, 2]),
    "Fill": lambda a: a + tf.fill(tf.shape(a), tf.constant(2.0, tf.float64)),
    "Mean": lambda a: [tf.reduce_mean(a, 0), tf.reduce_mean(a, 1), tf.reduce_mean(a)],
    "MatMul": lambda a: tf.matmul(a, a, transpose_a=True),
    "Softmax": tf.nn.softmax,
    "StridedSlice": lambda a: [a[:, :-1], a[:, None]],
    "Pack": lambda a: tf.stack([a, a * 2], 1),
    "gradient": gradients(lambda a: tf.reduce_mean(a, 1)),
}

CASES = {
    **{
        f"{name}, unknown columns": Case(
            lambda a, n, function=function: function(a[:, :n]),
            [real(B, 3), _ONE_TO_THREE],
            gathers=name in ("Reshape to a vector", "Mean", "gradient"),
        )
        for name, function in _UNKNOWN.items()
    },
    "Shape": Case(lambda a: [tf.shape(a), tf.shape(a, tf.int64)], [real(B, 3, 2 * B)]),
    "ShapeN": Case(lambda a, b: R.ShapeN(input=[a, b]), [real(B, 3), real(3, B)]),
    "PlaceholderWithDefault": Case(lambda a: R.PlaceholderWithDefault(input=a, shape=[None, None]), [real(B, 2 * B)]),
    "ZerosLike of a sum": Case(lambda a: tf.zeros_like(tf.reduce_sum(a, 0)), [real(B, 3)]),
    # Reshape
    "Reshape to an unknown number of rows": Case(lambda a: tf.reshape(a, [-1, 6]), [real(B, 2, 3)]),
    "Reshape to rows of elements": Case(lambda a: tf.reshape(a, [_rows(a) * 3, -1]), [real(B, 3, 2)]),
    "Reshape to blocks": Case(lambda a: tf.reshape(a, [3, -1, 2]), [real(3, 2 * B)]),
    "Reshape to a vector": Case(lambda a: tf.reshape(a, [-1]), [real(B, 2 * B)]),
    "Reshape of a vector": Case(lambda a: tf.reshape(a, [_rows(a) // 6, 3, 2]), [real(6 * B)]),
    "Reshape of rows to columns": Case(lambda a: tf.reshape(a, [2, _rows(a) * 3]), [real(B, 6)], gathers=True),
    "Reshape to one more dimension": Case(lambda a: tf.reshape(a, [1, _rows(a), 1, 3]), [real(B, 3)]),
    "Reshape to the shape of another": Case(lambda a, b: tf.reshape(a, tf.shape(b)), [real(B, 6), real(B, 2, 3)]),
    "Reshape of a sum": Case(lambda a: tf.reshape(tf.reduce_sum(a, 0), [2, -1]), [real(B, 4)]),
    "gradient of Reshape": Case(
        gradients(lambda a: tf.reshape(a, [-1, 3]) * tf.constant([1.0, 2.0, 3.0], tf.float64)), [real(B, 2, 3)]
    ),
    # Dimensions
    **{f"ExpandDims at {axis}": Case(operation("ExpandDims", axis=axis), [real(B, 2 * B)]) for axis in (0, 1, -1, -2)},
    "Squeeze of an axis": Case(operation("Squeeze", axis=[1]), [real(B, 1, 3 * B)]),
    "Squeeze of an axis from behind": Case(operation("Squeeze", axis=[-2]), [real(B, 3, 1, 2)]),
    "Squeeze where rows may be one": Case(operation("Squeeze"), [real(B, 1, 3)], gathers=True),
    "Squeeze of blocks of rows": Case(lambda a: tf.squeeze(tf.concat([a, a], 0)), [real(B, 1, 3)], gathers=True),
    "Squeeze without rows": Case(operation("Squeeze"), [real(3, 1, 2)]),
    "Transpose": Case(lambda a: tf.transpose(a, [2, 0, 1]), [real(B, 2 * B, 3)]),
    "Transpose without a permutation": Case(tf.transpose, [real(B, 2 * B)]),
    # Joining and cutting
    "ConcatV2 of rows": Case(lambda a, b: tf.concat([a, b], 0), [real(B, 3), real(2 * B, 3)], gathers=True),
    "ConcatV2 of columns": Case(lambda a, b: tf.concat([a, b], -1), [real(B, 3), real(B, B)]),
    "ConcatV2 of rows and others": Case(lambda a, b: tf.concat([a, b], 0), [real(B, 3), real(2, 3)], gathers=True),
    "ConcatV2 of three": Case(lambda a, b: tf.concat([a, b, a], 1), [real(B, 2, 2), real(B, 3, 2)]),
    "gradient of ConcatV2 of rows": Case(gradients(lambda a, b: tf.concat([a, b], 0)), [real(B, 2), real(B, 2)]),
    "gradient of ConcatV2 of columns": Case(gradients(lambda a, b: tf.concat([a, b], 1)), [real(B, 2), real(B, 3)]),
    **{
        f"Pack at {axis}": Case(lambda a, b, axis=axis: tf.stack([a, b], axis), [real(B, B), real(B, B)])
        for axis in (0, 1, -1)
    },
    **{f"Unpack at {axis}": Case(lambda a, axis=axis: tf.unstack(a, axis=axis), [real(B, 2, 3)]) for axis in (1, -1)},
    "Split of rows": Case(lambda a: tf.split(a, 2, 0), [real(2 * B, 2)], gathers=True),
    "Split of blocks of rows": Case(lambda a: tf.split(a, 2, 0), [real(4 * B, 2)], gathers=True),
    "Split of columns": Case(lambda a: tf.split(a, 2, -1), [real(B, 4)]),
    "SplitV of columns": Case(lambda a: tf.split(a, [1, -1], 1), [real(B, 4)]),
    "SplitV of rows": Case(lambda a: tf.split(a, [0, _rows(a)], 0), [real(B, 4)], gathers=True),
    "Pad of columns": Case(lambda a: tf.pad(a, [[0, 0], [1, 2]]), [real(B, 2 * B)]),
    "Pad of rows": Case(lambda a: tf.pad(a, [[1, 0], [0, 0]]), [real(B, 2)], gathers=True),
    "PadV2": Case(lambda a: tf.pad(a, [[0, 0], [1, 2]], constant_values=2), [real(B, 2 * B)]),
    **{
        f"MirrorPad, {mode}": Case(lambda a, mode=mode: tf.pad(a, [[0, 0], [1, 1]], mode), [real(B, 3)])
        for mode in ("REFLECT", "SYMMETRIC")
    },
    "MirrorPad of rows": Case(lambda a: tf.pad(a, [[1, 1], [0, 0]], "SYMMETRIC"), [real(B, 3)], gathers=True),
    **{
        f"MirrorPadGrad, {mode}": Case(operation("MirrorPadGrad", paddings=[[0, 0], [1, 1]], mode=mode), [real(B, 5)])
        for mode in ("REFLECT", "SYMMETRIC")
    },
    "Tile of rows": Case(lambda a: tf.tile(a, [2, 1]), [real(B, B)]),
    "Tile of columns": Case(lambda a: tf.tile(a, [1, 3]), [real(B, 2)]),
    "Tile by the number of rows": Case(lambda a, b: tf.tile(a, [1, _rows(b)]), [real(B, 2), real(B)]),
    "gradient of Tile": Case(gradients(lambda a: tf.tile(a, [1, 3])), [real(B, 2)]),
    # Shapes from rows
    "Fill": Case(lambda a: a + tf.fill(tf.shape(a), tf.constant(2.0, tf.float64)), [real(B, 3)]),
    "Fill of a scalar of a sum": Case(lambda a: a * tf.fill(tf.shape(a), tf.reduce_sum(a)), [real(B, 3)]),
    "Fill of a size that is not known": Case(
        lambda a, n: tf.concat([a, tf.fill([tf.shape(a)[0], n], tf.constant(0.5, tf.float64))], 1),
        [real(B, 2), indices(3)],
    ),
    "Fill alone": Case(lambda a: tf.fill([_rows(a), 2], tf.constant(2.0, tf.float64)), [real(B, 3)]),
    "Range": Case(lambda a: tf.cast(tf.range(_rows(a)), a.dtype) * a, [real(B)]),
    "Range of blocks": Case(lambda a: tf.range(0, _rows(a) * 2, 2), [real(B, 2)]),
    "BroadcastTo": Case(lambda a: tf.broadcast_to(a, [_rows(a), 5, _rows(a)]), [real(B, 1, 1)]),
    "BroadcastTo with a new dimension": Case(lambda a: tf.broadcast_to(a, [2, _rows(a), 3]), [real(B, 1)]),
    "BroadcastTo of a row": Case(lambda a, b: b + tf.broadcast_to(a, tf.shape(b)), [real(3), real(B, 3)]),
    # Slice
    "Slice of columns": Case(lambda a: tf.slice(a, [0, 1], [-1, 2]), [real(B, 4)]),
    "Slice of columns of rows": Case(lambda a: tf.slice(a, [0, 0, 1], [-1, _rows(a), -1]), [real(B, B, 2)]),
    "Slice of a block of rows": Case(
        lambda a: tf.slice(a, [_rows(a) // 2, 0], [-1, 2]), [real(2 * B, 2)], gathers=True
    ),
    "Slice of a middle block": Case(lambda a: tf.slice(a, [0, _rows(a)], [-1, _rows(a)]), [real(B, 3 * B)]),
    "Slice of some rows": Case(lambda a: tf.slice(a, [1, 0], [-1, 1]), [real(2 * B, 2)], gathers=True),
    "Slice of no rows": Case(lambda a: tf.slice(a, [0, 0], [0, 2]), [real(B, 2)], gathers=True),
    "Slice from where an operand says": Case(
        lambda a, i: tf.slice(a, tf.stack([0, i]), [-1, 1]), [real(B, 3), indices(3)]
    ),
    # StridedSlice
    "columns": Case(lambda a: a[:, 1:3], [real(B, 4)]),
    "columns from behind": Case(lambda a: a[:, -2:-1], [real(B, 4)]),
    "every second column": Case(lambda a: a[:, ::2], [real(B, 4)]),
    "reversed columns": Case(lambda a: a[:, ::-1], [real(B, 2 * B)]),
    "rows but the first": Case(lambda a: a[1:], [real(B, 2)], gathers=True),
    "the last row": Case(lambda a: a[-1:], [real(B, 2)], gathers=True),
    "the first rows": Case(lambda a: a[:2], [real(B, 2)], gathers=True),
    "the first row": Case(lambda a: a[0], [real(B, 2)], gathers=True),
    "reversed rows": Case(lambda a: a[::-1], [real(B, B)], gathers=True),
    "as many rows as there are": Case(lambda a: a[: _rows(a)], [real(B, 2)]),
    "more rows than there are": Case(lambda a: a[: _rows(a) + 1], [real(B, 2)]),
    "half of the rows": Case(lambda a: a[: _rows(a) // 2], [real(2 * B, 2)], gathers=True),
    "a new axis and a column": Case(lambda a: a[:, None, 0], [real(B, 2)]),
    "an ellipsis": Case(lambda a: a[..., 1:, 0], [real(B, 2 * B, 3, 2)]),
    "a new axis in front": Case(lambda a: a[None, :, 1:], [real(B, 3)]),
    "columns up to where an operand says": Case(lambda a, n: a[: _rows(a), :n], [real(B, 3), indices(3)]),
    "columns of columns of rows": Case(lambda a: a[:, : _rows(a)], [real(B, 2 * B)]),
    "StridedSliceGrad": Case(
        lambda g: R.StridedSliceGrad(
            shape=[_rows(g), 4], begin=[0, 1], end=[0, 3], strides=[1, 1], dy=g, begin_mask=1, end_mask=1
        ),
        [real(B, 2)],
    ),
    "StridedSliceGrad of as many columns as rows": Case(
        lambda g: R.StridedSliceGrad(
            shape=[_rows(g), 4, _rows(g)],
            begin=[0, 1, 0],
            end=[0, 3, _rows(g)],
            strides=[1, 1, 1],
            dy=g,
            begin_mask=1,
            end_mask=1,
        ),
        [real(B, 2, B)],
    ),
    "gradient of columns": Case(gradients(lambda a: a[:, 1:3]), [real(B, 4)]),
    "gradient of a column": Case(gradients(lambda a: a[:, 1]), [real(B, 4)]),
    "gradient of rows": Case(gradients(lambda a: a[1:]), [real(B, 4)], gathers=True),
    "integers keep their type": Case(
        lambda a: [tf.transpose(a), tf.reshape(a, [-1]), a[:, 1:]], [integers(B, 2, dtype="int64")]
    ),
    "Reshape of sizes at run time": Case(
        lambda a, n: tf.reshape(a[:, : 2 * n], tf.stack([_rows(a), n, 2])), [real(B, 4), indices(3)]
    ),
    "Reshape to a size at run time": Case(
        lambda a, n: tf.reshape(a[:, : 2 * n], [_rows(a), -1, 2]), [real(B, 4), between(1, 1, dtype="int32")]
    ),
    "LinSpace": Case(
        lambda a: [found := R.LinSpace(start=0.0, stop=1.0, num=tf.shape(a)[0]), tf.cast(found, a.dtype) * a], [real(B)]
    ),
    "EnsureShape": Case(lambda a: tf.ensure_shape(a, [None, None, 3]), [real(B, 2 * B, 3)]),
    "Size": Case(lambda a, n: a * tf.cast(tf.size(a[:, :n]), a.dtype), [real(B, 3), indices(3)]),
}
