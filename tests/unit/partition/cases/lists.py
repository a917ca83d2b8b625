"""Lists of tensors, in which loops collect what each of their rounds computes."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, indices, operation, real

R = tf.raw_ops
_KIND = tf.float64


def _empty():
    return R.EmptyTensorList(element_shape=[-1, 3], max_num_elements=-1, element_dtype=_KIND)


def _reserved(number: int, element_shape=(-1, 3)):
    return R.TensorListReserve(element_shape=list(element_shape), num_elements=number, element_dtype=_KIND)


def _push(values, tensor):
    return R.TensorListPushBack(input_handle=values, tensor=tensor)


def _set(values, index, item):
    return R.TensorListSetItem(input_handle=values, index=index, item=item)


def _get(values, index, element_shape=(-1, 3)):
    return R.TensorListGetItem(input_handle=values, index=index, element_shape=list(element_shape), element_dtype=_KIND)


def _pop(values, element_shape=(-1, 3)):
    return list(R.TensorListPopBack(input_handle=values, element_shape=list(element_shape), element_dtype=_KIND))


def _stack(values, element_shape=(-1, 3)):
    return R.TensorListStack(input_handle=values, element_shape=list(element_shape), element_dtype=_KIND)


def _pushed_and_popped(a, b):
    values, last = _pop(_push(_push(_empty(), a), b))
    return [last, *_pop(values)[1:], R.TensorListLength(input_handle=values)]


CASES = {
    "push and pop": Case(_pushed_and_popped, [real(B, 3), real(B, 3)]),
    "push rows and others": Case(_pushed_and_popped, [real(B, 3), real(2, 3)], gathers=True),
    "set and get": Case(
        lambda a, b: [_get(_set(_set(_reserved(2), 0, a), 1, b), 0), _get(_set(_set(_reserved(2), 0, a), 1, b), 1)],
        [real(B, 3), real(B, 3)],
    ),
    "set and stack": Case(lambda a, b: _stack(_set(_set(_reserved(2), 0, a), 1, b)), [real(B, 3), real(B, 3)]),
    "set where an operand says": Case(
        lambda a, i: _get(_set(_set(_reserved(2), 0, a), 1, a * 2), i), [real(B, 3), indices(2)]
    ),
    "get what was not set": Case(lambda a: _get(_set(_reserved(2), 0, a), 1, [tf.shape(a)[0], 3]), [real(B, 3)]),
    "pop what was not set": Case(lambda a: _pop(_set(_reserved(2), 0, a), [tf.shape(a)[0], 3])[1], [real(B, 3)]),
    "columns of rows": Case(lambda a: _stack(_set(_reserved(1, [3, -1]), 0, a), [3, -1]), [real(3, 2 * B)]),
    "from a tensor": Case(
        lambda a: [
            _get(R.TensorListFromTensor(tensor=a, element_shape=[-1, 3]), 1),
            _stack(R.TensorListFromTensor(tensor=a, element_shape=[-1, 3])),
        ],
        [real(2, B, 3)],
    ),
    "from rows": Case(
        lambda a: _stack(R.TensorListFromTensor(tensor=a, element_shape=[3]), [3]), [real(B, 3)], gathers=True
    ),
    "resize": Case(
        lambda a: [
            _get(_set(R.TensorListResize(input_handle=_set(_reserved(1), 0, a), size=2), 1, a * 2), 1),
            _get(R.TensorListResize(input_handle=_set(_reserved(1), 0, a), size=2), 1, [tf.shape(a)[0], 3]),
        ],
        [real(B, 3)],
    ),
    "length": Case(lambda a: R.TensorListLength(input_handle=_push(_empty(), a)), [real(B, 3)]),
    "shape of elements": Case(
        lambda a: R.TensorListElementShape(
            input_handle=_set(_reserved(1, [tf.shape(a)[0], 3]), 0, a), shape_type=tf.int32
        ),
        [real(B, 3)],
    ),
    "an empty list of a shape": Case(
        lambda a: _pop(
            _push(R.EmptyTensorList(element_shape=[tf.shape(a)[0], 3], max_num_elements=-1, element_dtype=_KIND), a),
            [tf.shape(a)[0], 3],
        )[1],
        [real(B, 3)],
    ),
    "from a tensor of a shape": Case(
        lambda a: _get(R.TensorListFromTensor(tensor=a, element_shape=[tf.shape(a)[1], 3]), 1, [tf.shape(a)[1], 3]),
        [real(2, B, 3)],
    ),
    "zeros like a list": Case(lambda a: _stack(operation("ZerosLike")(_push(_empty(), a))), [real(B, 3)]),
    "sum of lists": Case(
        lambda a, b: _stack(R.AddN(inputs=[_push(_empty(), a), _push(_empty(), b)])), [real(B, 3), real(B, 3)]
    ),
    "sums in a list": Case(
        lambda a, b: _stack(
            _push(
                _push(
                    R.EmptyTensorList(element_shape=[3], max_num_elements=-1, element_dtype=_KIND), tf.reduce_sum(a, 0)
                ),
                b,
            ),
            [3],
        ),
        [real(B, 3), real(3)],
    ),
    "scan": Case(lambda a: tf.scan(lambda state, row: state + row, tf.transpose(a, [1, 0, 2])), [real(B, 3, 2)]),
    "map over rows": Case(lambda a: tf.map_fn(lambda row: tf.reduce_sum(row) * row, a), [real(B, 3)], gathers=True),
    "gradient of a scan": Case(
        gradients(lambda a: tf.scan(lambda state, row: state * 0.5 + row, tf.transpose(a, [1, 0, 2]))), [real(B, 3, 2)]
    ),
}
