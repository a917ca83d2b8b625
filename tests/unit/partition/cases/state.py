"""Variables, checks, and what has effects outside of a graph."""

from __future__ import annotations

import functools

import tensorflow as tf

from unit.partition.brute_force import B, Case, real


@functools.cache
def variable() -> tf.Variable:
    """Return a variable."""
    with tf.init_scope():
        return tf.Variable(tf.constant([1.0, 2.0, 3.0], tf.float64))


def _checked(tensor):
    tf.debugging.Assert(tf.reduce_all(tensor < 1e9), [tensor])
    return tensor + 1


def _assigned(tensor):
    variable().assign(tf.reduce_sum(tensor, 0))
    return variable() * 2


CASES = {
    "ReadVariableOp": Case(lambda a: a * variable(), [real(B, 3)]),
    "Assert": Case(_checked, [real(B, 3)]),
    "assignment of a sum": Case(_assigned, [real(B, 3)]),
}
