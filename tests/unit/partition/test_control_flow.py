"""Branches and loops of a function whose rows are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.partition.collectives import Simulated
from hvkeras.partition.decisions import Call
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES
from unit.partition.ranks import Ranks, same

pytestmark = pytest.mark.oldest

ROWS = tf.TensorSpec([None, 2], tf.float64)
VALUES = np.arange(14.0).reshape(7, 2)


def branch(rows: tf.Tensor, number: tf.Tensor) -> Any:
    return tf.cond(number > 0, lambda: tf.reduce_sum(rows), lambda: tf.reduce_max(rows) + tf.reduce_min(rows))


def case(rows: tf.Tensor, number: tf.Tensor) -> Any:
    return tf.switch_case(number, [lambda: tf.reduce_max(rows), lambda: rows[0, 1], lambda: tf.reduce_sum(rows)])


def loop(rows: tf.Tensor, number: tf.Tensor) -> Any:
    return tf.while_loop(
        lambda place, _: place < number,
        lambda place, total: (place + 1, total + tf.reduce_sum(rows * total)),
        [tf.constant(0), tf.reduce_max(rows)],
    )[1]


def loop_that_tests_rows(rows: tf.Tensor, number: tf.Tensor) -> Any:
    limit = tf.cast(number, tf.float64) * 100
    return tf.while_loop(lambda own: tf.reduce_sum(own) < limit, lambda own: (own * 2,), [rows])[0]


@pytest.mark.parametrize("function", [branch, case, loop, loop_that_tests_rows])
def test_all_ranks_take_the_branch_of_rank_0(function: Callable[..., Any]):
    ranks = Ranks(function, [ROWS, tf.TensorSpec([], tf.int32)], separate=True)
    ranks.check(VALUES, 2)
    wanted = ranks.whole(tf.constant(VALUES), tf.constant(2))
    for results in ranks.run(of_rank=lambda rank: (VALUES, np.int32(2 - rank))):
        same(results[0], wanted)


def test_assignments_in_branches_and_loops():
    state, steps = tf.Variable([1.0, 1.0], dtype=tf.float64), tf.Variable(0)

    def function(rows: tf.Tensor) -> Any:
        for place in tf.range(4):
            if place % 2 == 0:
                state.assign_add(tf.reduce_sum(rows, 0))
            else:
                state.assign(state / tf.reduce_max(rows))
                steps.assign_add(tf.shape(rows)[0])
        return rows * state

    ranks = Ranks(function, [ROWS])
    for rows in (VALUES, VALUES[:2], VALUES[:1] + 1):
        ranks.check(rows)


def test_a_branch_that_reads_a_batch():
    batches = [np.arange(12.0).reshape(6, 2), np.arange(4.0).reshape(2, 2)]
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=ROWS)
    iterators = [iter(data) for _ in range(4)]

    def function(reads: tf.Tensor) -> Any:
        rows = tf.zeros([1, 2], tf.float64)
        if reads:
            rows = next(iterators[0]) * 2
        return rows, tf.shape(rows), tf.reduce_sum(rows, 0)

    resource = iterators[0]._iterator_resource
    ranks = Ranks(
        function,
        [tf.TensorSpec([], tf.bool)],
        rows=(),
        copies={id(resource): [iterator._iterator_resource for iterator in iterators[1:]]},
    )
    for reads in (True, False, True):
        ranks.check(reads)


def nested_branches(x: tf.Tensor, number: tf.Tensor, depth: int) -> Any:
    if depth == 0:
        return tf.reverse(x, [0])
    return tf.cond(number > depth, lambda: nested_branches(tf.sinh(x), number, depth - 1), lambda: x)


def nested_loops(x: tf.Tensor, number: tf.Tensor, depth: int) -> Any:
    if depth == 0:
        return tf.sinh(x)
    return tf.while_loop(
        lambda step, _: step < number, lambda step, x: (step + 1, nested_loops(tf.sinh(x), number, depth - 1)), [0, x]
    )[1]


@pytest.mark.parametrize("function", [nested_branches, nested_loops])
def test_nesting_does_not_multiply_work(function: Callable[..., Any]):
    decided: list[str] = []

    def counted(call: Call) -> Any:
        decided.append(call.name)
        return RULES["Sinh"](call)

    whole = tf.function(function, autograph=False).get_concrete_function(ROWS, tf.TensorSpec([], tf.int32), 12)
    partitioned = Partitioned(whole.graph, {"rows": (0,)}, {**RULES, "Sinh": counted})
    ranks = tf.function(
        lambda *given: partitioned.create([given[:2], given[2:]], [0, 1], 2, Simulated()), autograph=False
    )
    graph = ranks.get_concrete_function(*[ROWS] * 2, *[tf.TensorSpec([], tf.int32)] * 2).graph
    assert len(graph.as_graph_def().library.function) == 24  # as many as the whole function's: two a level
    assert len(decided) <= 2 * len(set(decided)) <= 26
