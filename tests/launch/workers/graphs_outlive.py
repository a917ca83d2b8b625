"""Run graphs that were traced before a change of the ranks of an elastic job, and check their results.

Arguments: the successive sizes of the job; worker 0 requests each of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd

hvd.init()
SIZES = [int(size) for size in sys.argv[1:]]
COMPILES = os.environ["HVKERAS_BACKEND"] == "native"

own = tf.Variable(0.0)  # rank + 1
weights = tf.Variable(tf.zeros([3]))
rows = tf.Variable(tf.zeros([8, 2]))
kept = tf.Variable(tf.zeros([2]))
gathered = tf.Variable(0.0)
plain = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
packed = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16)
twice = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2,
                                 average_aggregated_gradients=True)
for optimizer, variable in ((plain, weights), (packed, kept), (twice, gathered)):
    optimizer.build([variable])


@tf.function
def by_tape(scale: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights) * own * scale
    return hvd.DistributedGradientTape(tape).gradient(loss, weights)


@tf.function
def by_optimizer() -> Any:
    weights.assign(tf.zeros([3]))
    plain.apply_gradients([(tf.fill([3], own), weights)])
    kept.assign(tf.zeros([2]))
    packed.apply_gradients([(tf.fill([2], own), kept)])
    return -weights, -kept


@tf.function
def by_two_passes() -> Any:
    twice.apply_gradients([(own, gathered)])
    return gathered.value()


@tf.function
def in_a_loop() -> Any:
    total = 0.0
    for _ in tf.range(3):
        if total < 100.0:
            total += hvd.allreduce(own)
    return total


@tf.function
def by_sparse_tape() -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(rows, tf.cast([own], tf.int32))) * own
    slices = hvd.DistributedGradientTape(tape).gradient(loss, rows)
    return tf.math.unsorted_segment_sum(slices.values, slices.indices, 8)


@tf.function
def by_collectives() -> Any:
    number = tf.cast(own, tf.int32)
    mine = tf.fill([number], own)
    everyone = hvd.allgather(mine)
    first, second = hvd.grouped_allreduce([own, tf.fill([2], own)], op=hvd.Sum)
    received, splits = hvd.alltoall(tf.fill([hvd.size()], own), tf.fill([hvd.size()], 1))
    part = hvd.reducescatter(tf.fill([hvd.size(), 2], own), op=hvd.Sum)
    return everyone, first, second, received, splits, part, hvd.broadcast(own, 0), hvd.size_op(), hvd.rank_op()


@tf.function(jit_compile=COMPILES)
def compiled(value: Any) -> Any:
    return hvd.allreduce(value * 2.0), hvd.allgather(tf.reshape(value, [1]))


@tf.function
def outer() -> Any:
    return inner(own) + 1.0


@tf.function
def inner(value: Any) -> Any:
    return hvd.allreduce(value, op=hvd.Sum) + tf.cast(hvd.size(), tf.float32)


class Steps:
    @tf.function
    def step(self, value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Max)


steps = Steps()
concrete: list[Any] = []  # concrete functions, one of them without a reference to its tf.function


@tf.function
def calls_concrete(value: Any) -> Any:
    return concrete[0](value)


traced: dict[str, Any] = {}


def check(name: str, found: Any, expected: Any) -> None:
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), err_msg=f"{name}, with {hvd.size()} ranks")


def check_all() -> None:
    size, rank = hvd.size(), hvd.rank()
    numbers = np.arange(1.0, size + 1)
    mean, total = numbers.mean(), numbers.sum()
    own.assign(rank + 1.0)
    check("tape", by_tape(tf.constant(2.0)), np.full(3, 2 * mean))
    check("optimizer", by_optimizer(), (np.full(3, mean), np.full(2, mean)))
    gathered.assign(0.0)
    check("two passes", (by_two_passes(), by_two_passes()), (0.0, -mean))
    check("loop", in_a_loop(), 3 * mean)
    sparse = np.zeros((8, 2))
    sparse[1 : size + 1] = numbers[:, None] / size
    check("sparse", by_sparse_tape(), sparse)
    check("collectives", by_collectives(), (
        np.repeat(numbers, numbers.astype(int)), total, np.full(2, total), numbers, np.ones(size),
        np.full((1, 2), total), 1.0, size, rank))
    check("compiled", compiled(own), (2 * mean, numbers))
    check("nested", outer(), total + size + 1)
    check("method", steps.step(own), size)
    if not concrete:
        made: Callable[[Any], Any] = tf.function(lambda value: hvd.allreduce(value, op=hvd.Min) + float(hvd.size()))
        concrete.extend([by_tape.get_concrete_function(tf.TensorSpec([])), made.get_concrete_function(own.value()),
                         steps.step.get_concrete_function(tf.TensorSpec([]))])
    check("concrete", [function(tf.constant(2.0 + 0 * rank)) for function in concrete],
          [np.full(3, 2 * mean), 2.0 + size, 2.0])
    check("concrete in a function", calls_concrete(tf.constant(1.0)), np.full(3, mean))
    print("right with", size, flush=True)


state = hvd.elastic.TensorFlowState([own], stage=0)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.stage < len(SIZES):
        check_all()
        if hvd.size() == SIZES[state.stage]:
            state.stage += 1
            if hvd.rank() == 0 and state.stage < len(SIZES):
                Path("hosts.new").write_text(f"localhost:{SIZES[state.stage]}\n")
                Path("hosts.new").rename("hosts")  # it may be read at any time
        time.sleep(0.1)
        state.commit()


train(state)
print("done", flush=True)
