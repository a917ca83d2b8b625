"""Variables and other resources, of which each rank has its own: afterwards they are alike, and as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from unit.partition.ranks import Ranks, same

ROWS = tf.TensorSpec([None, 2], tf.float64)
VALUES = np.arange(14.0).reshape(7, 2)


@pytest.mark.oldest
def test_variables():
    whole = tf.Variable(np.zeros([1, 2]), shape=[None, 2])
    total, table = tf.Variable(np.zeros([2])), tf.Variable(np.zeros([4, 2]))
    slots = [tf.Variable(np.zeros([2])) for _ in range(2)]

    def function(rows: tf.Tensor) -> Any:
        whole.assign(rows * 2)
        total.assign_add(tf.reduce_sum(rows, 0))
        total.assign_sub(tf.reduce_mean(rows, 0))
        places = tf.cast(rows[:, 0], tf.int32) % 4
        table.scatter_add(tf.IndexedSlices(rows, places))
        table.scatter_nd_add(places[:, None], rows)
        table[1, :].assign(tf.reduce_max(rows, 0))
        half, gradient = tf.constant(0.5, tf.float64), tf.linalg.matvec(rows, rows[:, 0], transpose_a=True)
        tf.raw_ops.ResourceApplyMomentum(
            var=slots[0].handle, accum=slots[1].handle, lr=half, momentum=half, grad=gradient
        )
        tf.raw_ops.ResourceSparseApplyAdagrad(var=table.handle, accum=table.handle, lr=half, grad=rows, indices=places)
        return total * rows, whole + 1, tf.gather(table, places), table.sparse_read(places), total.value() + 1

    ranks = Ranks(function, [ROWS])
    for rows in (VALUES, VALUES[:2] + 1, VALUES[:1], VALUES[:0]):
        ranks.check(rows)


def test_generators():
    generator = tf.random.Generator.from_seed(1)

    def function(rows: tf.Tensor) -> Any:
        shape = tf.shape(rows)
        noise = generator.normal(shape, dtype=tf.float64) * rows
        generator.skip(tf.shape(rows)[0])
        noise += generator.uniform(shape, dtype=tf.float64) + generator.truncated_normal([2], dtype=tf.float64)
        whole = generator.binomial([3], [4.0, 5.0, 6.0], [0.5])
        return (
            noise,
            whole,
            generator.uniform_full_int([2], dtype=tf.int32),
            generator.make_seeds(2),
            generator.uniform([], maxval=tf.shape(rows)[0] + 1, dtype=tf.int32),
        )

    ranks = Ranks(function, [ROWS])
    assert ranks.variables
    for rows in (VALUES, VALUES[:2]):
        ranks.check(rows)


@pytest.mark.parametrize("separate", [False, True])
def test_random_numbers_without_a_seed_are_those_of_all_ranks(separate: bool):
    state = tf.Variable(np.zeros([2]))

    def function(rows: tf.Tensor) -> Any:
        scale = tf.random.uniform([], dtype=tf.float64) + tf.random.normal([2], dtype=tf.float64)
        state.assign(scale)
        noise = tf.random.normal(tf.shape(rows), dtype=tf.float64)
        return noise, scale, tf.reduce_sum(noise), tf.random.shuffle(tf.range(9)), tf.nn.dropout(rows, 0.5)

    ranks = Ranks(function, [ROWS], separate=separate)
    first, *others = ranks.run(VALUES)
    for results in others:
        for result, wanted in zip(results, first, strict=True):
            same(result, wanted)
    same(first[2], tf.reduce_sum(first[0]))
    assert len(np.unique(first[0])) == VALUES.size
    for copy in ranks.variables[0][2:]:
        same(copy, ranks.variables[0][1])


def test_random_numbers_with_a_seed():
    tf.random.set_seed(3)

    def function(rows: tf.Tensor) -> Any:
        return (
            tf.random.normal(tf.shape(rows), dtype=tf.float64, seed=1) + rows,
            tf.random.shuffle(rows, seed=2),
            tf.random.gamma([2], rows, dtype=tf.float64, seed=3),
            tf.random.categorical(rows, 3, seed=4),
        )

    ranks = Ranks(function, [ROWS])
    for _ in range(2):
        ranks.check(VALUES + 1)


@pytest.mark.oldest
def test_tables():
    def mutable() -> Any:
        return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, -1.0)

    tables = [mutable() for _ in range(4)]
    constant = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([2, 4], ["two", "four"], tf.int64, tf.string), "?"
    )

    def function(rows: tf.Tensor) -> Any:
        keys = tf.cast(rows[:, 0], tf.int64)
        before = tables[0].lookup(keys)
        tables[0].insert(keys, rows[:, 1] + tf.reduce_max(rows))
        tables[0].remove(keys[:1])
        return before, tables[0].lookup(keys), tables[0].size(), tf.sort(tables[0].export()[1]), constant.lookup(keys)

    ranks = Ranks(
        function, [ROWS], copies={id(tables[0].resource_handle): [table.resource_handle for table in tables[1:]]}
    )
    for rows in (VALUES, VALUES[:2] + 4):
        ranks.check(rows)


def stack(rows: tf.Tensor) -> Any:
    handle = tf.raw_ops.StackV2(max_size=-1, elem_type=tf.float64)
    pushed = tf.raw_ops.StackPushV2(handle=handle, elem=rows * 2)
    with tf.control_dependencies([pushed]):
        pushed = tf.raw_ops.StackPushV2(handle=handle, elem=tf.reduce_sum(rows))
    with tf.control_dependencies([pushed]):
        last = tf.raw_ops.StackPopV2(handle=handle, elem_type=tf.float64)
    with tf.control_dependencies([last]):
        return last, tf.raw_ops.StackPopV2(handle=handle, elem_type=tf.float64) + rows


def array(rows: tf.Tensor) -> Any:
    handle, flow = tf.raw_ops.TensorArrayV3(size=2, dtype=tf.float64)
    flow = tf.raw_ops.TensorArrayWriteV3(handle=handle, index=0, value=rows * 2, flow_in=flow)
    flow = tf.raw_ops.TensorArrayWriteV3(handle=handle, index=1, value=rows * tf.reduce_max(rows), flow_in=flow)
    return tf.raw_ops.TensorArrayGatherV3(handle=handle, indices=[1, 0], flow_in=flow, dtype=tf.float64) + rows


def queue(rows: tf.Tensor) -> Any:
    handle = tf.raw_ops.FIFOQueueV2(component_types=[tf.float64], shapes=[[2]])
    tf.raw_ops.QueueEnqueueManyV2(handle=handle, components=[rows * 2])
    first = tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.float64])[0]
    return first + rows, tf.raw_ops.QueueSizeV2(handle=handle)


@pytest.mark.oldest
@pytest.mark.parametrize("effects", ["all", "first"])
@pytest.mark.parametrize("function", [stack, array, queue])
def test_other_resources(function: Callable[..., Any], effects: str):
    ranks = Ranks(function, [ROWS], effects=effects)
    ranks.check(VALUES)


def test_what_differs_between_ranks_is_that_of_the_first():
    def function(rows: tf.Tensor) -> Any:
        now = tf.timestamp()
        return now, tf.reduce_sum(rows) * now

    ranks = Ranks(function, [ROWS], effects="first", separate=True)
    results = ranks.run(VALUES)
    assert len({float(of_rank[0]) for of_rank in results}) == len({float(of_rank[1]) for of_rank in results}) == 1


@pytest.mark.parametrize("effects", ["all", "first"])
def test_a_loop_over_a_data_set(effects: str):
    data = tf.data.Dataset.from_tensor_slices(VALUES).batch(3)
    state = tf.Variable(np.zeros([2]))

    def function(rows: tf.Tensor) -> Any:
        for batch in data:
            state.assign_add(tf.reduce_mean(batch, 0) * tf.reduce_sum(rows))
        return rows * state

    Ranks(function, [ROWS], effects=effects).check(VALUES)
