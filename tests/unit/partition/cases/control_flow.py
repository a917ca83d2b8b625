"""Branches and loops: their functions are programs of their own."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, indices, operation, real, truths
from unit.partition.cases.state import variable

_DRAW = operation("RandomUniform", seed=5, seed2=7, dtype=tf.float64)


def _loop(body, *start, times: int = 3):
    return tf.while_loop(
        lambda number, *_: number < times, lambda number, *values: (number + 1, *body(*values)), [0, *start]
    )[1:]


@tf.function(autograph=False)
def _doubled(tensor):
    return tensor * 2 + 1


@tf.function(autograph=False)
def _counted(tensor):
    tf.debugging.assert_less(tensor, tf.constant(1e9, tf.float64))
    return tensor - tf.reduce_max(tensor, 0)


@tf.function(autograph=False, jit_compile=True)
def _compiled(tensor):
    return tensor * 2 + 1


@tf.function(autograph=False, jit_compile=True)
def _compiled_with_rows(tensor):
    return tensor - tf.reduce_max(tensor, 0)


def _both(condition, *branches):
    return [tf.cond(chosen, *branches) for chosen in (condition, tf.logical_not(condition))]


def _each(index, branches):
    return [tf.switch_case((index + further) % len(branches), branches) for further in range(len(branches))]


CASES = {
    "functions of an old kind": Case(
        lambda a: tf.nn.ctc_loss(
            tf.ones([tf.shape(a)[1], 2], tf.int32),
            a,
            tf.fill([tf.shape(a)[1]], 2),
            tf.fill([tf.shape(a)[1]], 3),
            blank_index=0,
        ),
        [real(3, B, 4, dtype="float32")],
        gathers=True,
        tolerance=1e-4,
    ),
    # Branches
    "StatelessIf of rows": Case(lambda c, a: _both(c, lambda: a * 2, lambda: a - 1), [truths(), real(B, 2 * B)]),
    "StatelessIf with a collective": Case(
        lambda a: tf.cond(tf.reduce_sum(a) > 0, lambda: a * 2, lambda: a - tf.reduce_max(a, 0)), [real(B, 2)]
    ),
    "StatelessIf of unlike layouts": Case(
        lambda c, a: _both(c, lambda: a, lambda: tf.reverse(a, [0])), [truths(), real(B, 2)], gathers=True
    ),
    "StatelessIf of sums": Case(
        lambda c, a: _both(c, lambda: tf.reduce_sum(a, 0), lambda: tf.reduce_sum(a * a, 0)), [truths(), real(B, 2)]
    ),
    "StatelessIf of a sum and a constant": Case(
        lambda c, a: _both(c, lambda: tf.reduce_sum(a, 0), lambda: tf.ones([2], tf.float64)), [truths(), real(B, 2)]
    ),
    "StatelessIf of a sum and a maximum": Case(
        lambda c, a: _both(c, lambda: tf.reduce_sum(a, 0), lambda: tf.reduce_max(a, 0)), [truths(), real(B, 2)]
    ),
    "If": Case(lambda c, a: _both(c, lambda: a + _DRAW(tf.shape(a)), lambda: a - 1), [truths(), real(B, 2)]),
    "StatelessCase": Case(
        lambda i, a: _each(i, [lambda: a, lambda: a + 1, lambda: tf.reverse(a, [0])]),
        [indices(3), real(B, 2)],
        gathers=True,
    ),
    "StatelessCase of rows": Case(
        lambda i, a, b: _each(i, [lambda: a + b, lambda: a - b, lambda: b]), [indices(3), real(B, 2), real(B, 2)]
    ),
    "Case": Case(lambda i, a: _each(i, [lambda: a, lambda: a + variable()[:2]]), [indices(2), real(B, 2)]),
    "gradient of a branch": Case(
        gradients(lambda a: tf.cond(tf.reduce_sum(a) > 0, lambda: a * 2, lambda: a * a)), [real(B, 2)]
    ),
    # Calls
    "PartitionedCall": Case(_doubled, [real(B, 2 * B)]),
    "StatefulPartitionedCall": Case(_counted, [real(B, 2)]),
    "compiled call": Case(_compiled, [real(B, 2)]),
    "compiled call with a collective": Case(_compiled_with_rows, [real(B, 2)]),
    # Loops
    "StatelessWhile of rows": Case(lambda a: _loop(lambda x: [x * 2 + 1], a), [real(B, 2 * B)]),
    "StatelessWhile with a collective": Case(lambda a: _loop(lambda x: [x * 0.5 + tf.reduce_sum(x)], a), [real(B, 2)]),
    "StatelessWhile of sums": Case(
        lambda a: _loop(lambda x, total: [x + 1, total + tf.reduce_sum(x, 0)], a, tf.zeros([2], tf.float64)),
        [real(B, 2)],
    ),
    "StatelessWhile of sums that are multiplied": Case(
        lambda a: _loop(lambda x, total: [x, total * tf.reduce_sum(x, 0)], a, tf.ones([2], tf.float64)), [real(B, 2)]
    ),
    "StatelessWhile of two that are swapped": Case(
        lambda a, b: _loop(lambda x, y: [y, x + 1], a, b), [real(B, 2), real(B, 2)]
    ),
    "StatelessWhile until rows say": Case(
        lambda a: tf.while_loop(lambda x: tf.reduce_max(x) < 50, lambda x: [x + tf.abs(x) + 1], [a]), [real(B, 2)]
    ),
    "StatelessWhile of more rows": Case(
        lambda a: tf.while_loop(
            lambda number, x: number < 2,
            lambda number, x: [number + 1, tf.concat([x, x], 0)],
            [0, a],
            [tf.TensorShape([]), tf.TensorShape([None, 2])],
        )[1],
        [real(B, 2)],
        gathers=True,
    ),
    "While": Case(lambda a: _loop(lambda x: [x + _DRAW(tf.shape(x))], a), [real(B, 2)]),
    "loop in a loop": Case(
        lambda a: _loop(lambda x: _loop(lambda y: [y * 0.5 + tf.reduce_max(y, 0)], x, times=2), a, times=2),
        [real(B, 2)],
    ),
    "branch in a loop": Case(
        lambda a: _loop(lambda x: [tf.cond(tf.reduce_sum(x) > 9, lambda: x * 0.5, lambda: x + 1)], a), [real(B, 2)]
    ),
    "gradient of a loop": Case(
        gradients(lambda a, b: _loop(lambda x: [tf.matmul(x, b) * 0.5 + x], a)), [real(B, 2), real(2, 2)]
    ),
    "gradient of a loop in a loop": Case(
        gradients(lambda a: _loop(lambda x: _loop(lambda y: [tf.sin(y)], x * x, times=2), a, times=2)), [real(B, 2)]
    ),
    "gradient of a loop in a loop with a collective": Case(
        gradients(
            lambda a: _loop(lambda x: _loop(lambda y: [tf.sin(y) + tf.reduce_mean(x, 0)], x, times=2), a, times=2)
        ),
        [real(B, 2)],
    ),
    "gradient of a loop with a collective": Case(
        gradients(lambda a: _loop(lambda x: [x * tf.reduce_mean(x, 0)], a)), [real(B, 2)]
    ),
}
