"""Batches that a function reads itself: their rows are divided where they come in."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, indices, operation, real, truths


def _iterator(*tensors):
    return iter(tf.data.Dataset.from_tensors(tensors))


def _read_in_a_branch(condition, tensor):
    iterator = _iterator(tensor)

    def read():
        part = next(iterator)[0]
        return [part * 2, tf.shape(part)]

    return tf.cond(condition, read, lambda: [tensor, tf.shape(tensor)])


def _next(tensor, type_: str):
    iterator = _iterator(tensor)
    return operation(type_, output_types=[tensor.dtype], output_shapes=[tensor.shape])(iterator._iterator_resource)


CASES = {
    "IteratorGetNext": Case(lambda a: _next(a, "IteratorGetNext"), [real(B, 3)], gathers=True),
    "IteratorGetNextSync": Case(lambda a: _next(a, "IteratorGetNextSync"), [real(B, 3)], gathers=True),
    "OptionalGetValue": Case(lambda a: _iterator(a).get_next_as_optional().get_value(), [real(B, 3)], gathers=True),
    "parts of a batch": Case(
        lambda a, b: [tf.reduce_sum(part) for part in next(_iterator(a, b))], [real(B, 3), real(B)], gathers=True
    ),
    "strings": Case(
        lambda a: tf.strings.length(_next(tf.strings.as_string(a), "IteratorGetNext")), [indices(99, B)], gathers=True
    ),
    "a batch that a branch reads": Case(_read_in_a_branch, [truths(), real(B, 3)], gathers=True),
}
