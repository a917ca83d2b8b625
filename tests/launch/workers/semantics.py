"""What collectives of Horovod give, and their gradients; written for Horovod, it knows nothing of hvkeras."""

import json
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
rank, size = hvd.rank(), hvd.size()
base = tf.constant(np.arange(6.0).reshape(3, 2) + 10 * rank)
rows = tf.constant(np.arange(2.0 * (rank + 1)).reshape(rank + 1, 2) + 10 * rank)
slices = tf.IndexedSlices(rows, tf.range(rank + 1), tf.constant([4, 2]))
COLLECTIVES = {
    "average": (hvd.allreduce, base),
    "sum": (lambda value: hvd.allreduce(value, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), base),
    "adasum": (lambda value: hvd.allreduce(value, op=hvd.Adasum), base + 1.0),
    "fp16": (lambda value: hvd.allreduce(value, compression=hvd.Compression.fp16), base),
    "group": (lambda value: tf.concat(hvd.grouped_allreduce([value, value**2]), 0), base),
    "allgather": (hvd.allgather, rows),
    "gathered group": (lambda value: tf.concat(hvd.grouped_allgather([value, 2 * value]), 0), rows),
    "broadcast": (lambda value: hvd.broadcast(value, root_rank=1), base),
    "alltoall": (lambda value: hvd.alltoall(value, splits=[1, 2])[0], base),
    "scattered sum": (lambda value: hvd.reducescatter(value, op=hvd.Sum), base),
    "scattered average": (lambda value: hvd.reducescatter(value, op=hvd.Average, prescale_factor=0.5), base),
    "scattered group": (lambda value: hvd.grouped_reducescatter([value, 2 * value], op=hvd.Sum)[1], base),
}
OTHERS = {
    "default scatter": lambda: hvd.reducescatter(base),
    "average of integers": lambda: hvd.allreduce(tf.constant([3, -3, 7]) + rank),
    "min": lambda: hvd.allreduce(base, op=hvd.Min),
    "max of booleans": lambda: hvd.allreduce(tf.constant([rank, 1, 0]), op=hvd.Max),
    "product": lambda: hvd.allreduce(base + 1.0, op=hvd.Product),
    "average=False": lambda: hvd.allreduce(base, average=False),
    "slices": lambda: hvd.allreduce(slices).values,
    "group of slices": lambda: hvd.grouped_allreduce([slices], op=hvd.Sum)[0].values,
    "raw sum": lambda: hvd._allreduce(base, name="raw"),
    "raw scatter": lambda: hvd._reducescatter(base, name="raw"),
    "splits": lambda: hvd.alltoall(base, splits=tf.constant([2, 1]))[1],
    "even": lambda: hvd.alltoall(tf.range(4) + 10 * rank),
    "empty": lambda: hvd.allgather(tf.ones([2 * rank, 3])),
    "object": lambda: tf.constant(hvd.allgather_object({"rank": rank})[1]["rank"]),
    "ranks": lambda: tf.stack([hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]),
}


def shown(tensor):
    return None if tensor is None else [tensor.dtype.name, np.round(tf.cast(tensor, tf.float64), 3).tolist()]


def derived(function, value):
    with tf.GradientTape() as tape:
        tape.watch(value)
        result = function(value)
        loss = tf.reduce_sum(result * tf.reshape(tf.range(tf.size(result), dtype=tf.float64) + rank, tf.shape(result)))
    return result, tape.gradient(loss, value)


found = {}
for name, (function, value) in COLLECTIVES.items():
    found[name] = [shown(part) for part in derived(function, value)]
    in_graph = tf.function(lambda value, function=function: derived(function, value), autograph=False)
    found[f"{name} in a graph"] = [shown(part) for part in in_graph(value)]
for name, function in OTHERS.items():
    found[name] = shown(function())
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump(found, file)
hvd.shutdown()
