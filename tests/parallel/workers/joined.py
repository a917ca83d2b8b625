"""`join()`: ranks have different amounts of work; each check returns a value that the test compares.

Arguments: the names of checks; default: all.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import tensorflow as tf

import hvkeras as hvd
import hvkeras.tensorflow as hvd_tf
from harness.checks import check, run_checks


def all_kinds() -> Any:
    """Collectives of every kind, with and without names, in eager mode."""
    mine = hvd.rank() + 1
    several = hvd.grouped_allreduce([tf.fill([2], float(mine)), tf.constant([mine]), tf.constant(mine, tf.float64)],
                                    op=hvd.Sum)
    return [
        [part.numpy().tolist() for part in several],
        float(hvd.allreduce(float(mine), name="mean")),
        [int(hvd.allreduce(sign * mine, op=op)) for sign in (1, -1) for op in (hvd.Min, hvd.Max)],
        float(hvd.allreduce(tf.constant(mine, tf.float16), op=hvd.Product)),
        hvd.allgather(tf.fill([mine, 2], mine)).numpy()[:, 0].tolist(),
        float(hvd.broadcast(float(mine), root_rank=hvd.size() - 1)),
        hvd.reducescatter(tf.ones([hvd.size()]), op=hvd.Sum).numpy().tolist(),
        hvd.alltoall(tf.fill([hvd.size()], mine)).numpy().tolist(),
        hvd.allgather_object(mine),
    ]


@check
def eager() -> Any:
    found = [all_kinds() for _ in range(1 + hvd.rank())]
    return [found, hvd.join()]


@check
def at_once() -> Any:
    """All ranks join at once, rank 0 last."""
    if hvd.rank() == 0:
        time.sleep(1.0)
    return [hvd_tf.join(), hvd_tf.join() in range(hvd.size())]


@check
def graphs() -> Any:
    """Steps of a custom loop, dense and sparse: eager, in a function, and in a loop of a function."""
    variable, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2) * (hvd.rank() + 1) + tf.reduce_sum(tf.gather(table, [hvd.rank()]) ** 2)
        dense, sparse = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [variable, table])
        return dense, sparse.values, sparse.indices

    function = tf.function(step)

    loop = tf.function(lambda: tf.while_loop(
        lambda turn, *_: turn < 1, lambda turn, *_: (turn + 1, *step()),
        [0, tf.zeros([2]), tf.zeros([0, 2]), tf.zeros([0], tf.int32)],
        shape_invariants=[tf.TensorShape(shape) for shape in ([], [2], [None, 2], [None])])[1:])
    found = [step(), function(), *(loop() for _ in range(hvd.rank()))]
    return [[[part.numpy().tolist() for part in parts] for parts in found], hvd.join()]


@check
def never_seen() -> Any:
    """Collectives that the joined ranks have never run themselves, in a graph and in a process set."""
    pair = hvd.add_process_set([0, hvd.size() - 1])
    found = None
    if hvd.rank() == hvd.size() - 1:
        new = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="new"))
        found = [new(tf.ones([2, 3])).numpy().tolist(), float(hvd.allreduce(5.0, op=hvd.Sum, process_set=pair))]
        hvd.barrier()
    return [found, hvd.join()]


@check
def constants_in_a_function() -> Any:
    """A constant may differ between ranks, so each step communicates."""
    constant = tf.function(lambda: hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum, name="c"))
    other = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="c"))
    return [float((other(tf.constant([10.0 * step])) if hvd.rank() == 0 else constant())[0]) for step in range(3)]


if __name__ == "__main__":
    run_checks(hvd.init, hvd.shutdown, sys.argv[1:])
