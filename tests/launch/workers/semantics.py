"""Results and gradients of Horovod's collectives, and the members of its objects.

The script uses Horovod's API, without any reference to hvkeras.
"""

import importlib
import inspect
import json
import sys

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from horovod.common.util import is_version_greater_equal_than
from horovod.tensorflow import functions, mpi_ops, util

sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
hvd.init(process_sets=sets)
rank, size = hvd.rank(), hvd.size()
mine, foreign = sets[rank], sets[1 - rank]
base = tf.constant(np.arange(6.0).reshape(3, 2) + 10 * rank)
rows = tf.constant(np.arange(2.0 * (rank + 1)).reshape(rank + 1, 2) + 10 * rank)
slices = tf.IndexedSlices(rows, tf.range(rank + 1), tf.constant([4, 2]))
variable = tf.Variable(2.0)


def outside():
    """Return the gradient of a tape of a process set without this rank."""
    with tf.GradientTape() as tape:
        loss = (rank + 1.0) * variable**2
    return hvd.DistributedGradientTape(tape, process_set=foreign).gradient(loss, variable)


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
    "scaled integers": lambda: hvd.allreduce(tf.constant([3, 5, -7]), op=hvd.Sum, prescale_factor=0.5),
    "integers scaled back": lambda: hvd.allreduce(tf.constant([3, 5, -7]), op=hvd.Sum, postscale_factor=0.3),
    "scalars": lambda: hvd.allgather(tf.constant(1.5 + rank)),
    "average of a set": lambda: hvd.allreduce(base, process_set=mine),
    "gathered by a set": lambda: hvd.allgather(rows, process_set=mine),
    "sent by a set": lambda: hvd.broadcast(base, rank, process_set=mine),
    "adasum of halves": lambda: hvd.allreduce(tf.constant([1.0, 2.0 * rank], tf.float16), op=hvd.Adasum),
    "booleans": lambda: tf.stack([hvd.broadcast(rows[0, 0] > 5, 1), *tf.unstack(hvd.allgather([rank > 0, True]))]),
    "exchanged booleans": lambda: hvd.alltoall(tf.constant([True, rank > 0])),
    "bytes": lambda: hvd.allreduce(tf.constant([200, 100, 1], tf.uint8), op=hvd.Sum),
    "average of halves": lambda: hvd.allreduce(tf.constant([1.001, 3.3 + rank], tf.float16)),
    "splits": lambda: hvd.alltoall(base, splits=tf.constant([2, 1]))[1],
    "even": lambda: hvd.alltoall(tf.range(4) + 10 * rank),
    "empty": lambda: hvd.allgather(tf.ones([2 * rank, 3])),
    "object": lambda: tf.constant(hvd.allgather_object({"rank": rank})[1]["rank"]),
    "outside": outside,
    "outside in a graph": tf.function(outside, autograph=False),
    "ranks": lambda: tf.stack([hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]),
}
ERRORS = {
    "shape": lambda: hvd.allreduce(tf.ones([2 + rank]), name="shape"),
    "dimensions": lambda: hvd.allgather(tf.ones([2, 2 + rank]), name="dimensions"),
    "dtype": lambda: hvd.broadcast(tf.ones([2], tf.float32 if rank else tf.int32), 0, name="dtype"),
    "root": lambda: hvd.broadcast(base, rank, name="root"),
    "function": lambda: tf.function(hvd.allreduce)(tf.ones([3 + rank]), name="function"),
    "op": lambda: hvd.allreduce(base, op=hvd.Min if rank else hvd.Sum, name="op"),
    "foreign sum": lambda: hvd.allreduce(base, process_set=foreign),
    "foreign gather": lambda: hvd.allgather(base, process_set=foreign),
    "foreign broadcast": lambda: hvd.broadcast(base, 1 - rank, process_set=foreign),
    "foreign exchange": lambda: hvd.alltoall(base, process_set=foreign),
    "foreign scatter": lambda: hvd.reducescatter(base, process_set=foreign),
    "root of another set": lambda: hvd.broadcast(base, 1 - rank, process_set=mine),
    "many splits": lambda: hvd.alltoall(base, splits=[1, 1, 1]),
    "large splits": lambda: hvd.alltoall(base, splits=[3, 3]),
    "long splits": lambda: hvd.alltoall(base, splits=tf.constant([1, 2], tf.int64)),
    "odd rows": lambda: hvd.alltoall(base),
    "scalar": lambda: hvd.reducescatter(tf.constant(1.0)),
    "sparse adasum": lambda: hvd.allreduce(slices, op=hvd.Adasum),
    "sparse min": lambda: hvd.allreduce(slices, op=hvd.Min),
    "average and op": lambda: hvd.allreduce(base, average=True, op=hvd.Sum),
    "odd version": lambda: is_version_greater_equal_than("2.4.0", "2"),
    "set twice": lambda: hvd.add_process_set([0]),
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
for dtype in ("uint8", "int8", "int32", "int64", "float16", "float32"):
    few = tf.cast(tf.constant([1, 2, 3, 4]) + rank, dtype)
    OTHERS |= {
        f"sum of {dtype}": lambda few=few: hvd.allreduce(few, op=hvd.Sum),
        f"average of {dtype}": lambda few=few: hvd.allreduce(few),
        f"product of {dtype}": lambda few=few: hvd.allreduce(few, op=hvd.Product),
        f"scatter of {dtype}": lambda few=few: hvd.reducescatter(few, op=hvd.Sum),
    }
for dtype in ("uint8", "int16", "int64", "float16"):
    few = tf.IndexedSlices(tf.cast(rows, dtype), slices.indices, slices.dense_shape)
    OTHERS |= {
        f"average of slices of {dtype}": lambda few=few: hvd.allreduce(few).values,
        f"sum of slices of {dtype}": lambda few=few: hvd.allreduce(few, op=hvd.Sum).values,
        f"group of slices of {dtype}": lambda few=few: hvd.grouped_allreduce([few, few])[1].values,
        f"average by a set of slices of {dtype}": lambda few=few: hvd.allreduce(few, process_set=mine).values,
    }
for name, function in OTHERS.items():
    try:
        found[name] = shown(function())
    except Exception as error:  # noqa: BLE001 - Horovod does not have every type
        found[name] = type(error).__name__
found["sets"] = [mine.rank(), mine.size(), mine.included(), foreign.included(), hvd.ProcessSet([0]).size(),
                 hvd.ProcessSet([1]).included(), mine.ranks, hvd.global_process_set.size()]
basics = mpi_ops._basics
as_it_was = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))._optimizer
found["basics"] = [basics.rank(), basics.size(), basics.is_initialized(), basics.Adasum, basics.cross_size(),
                   sorted(basics._get_process_set_ids_and_ranks().items()),
                   basics._process_set_size(mine.process_set_id), basics._process_set_rank(mine.process_set_id)]
in_graph = tf.function(lambda: tf.constant([place._executing_eagerly() for place in (hvd, functions, mpi_ops, util)]))
found["eagerly"] = [hvd._executing_eagerly(), shown(in_graph())]
found["versions"] = [is_version_greater_equal_than(version, "2.4.0") for version in
                     ("2.10.0", "2.4.0", "2.4.0-rc1", "2.4")]
found["as it was"] = [type(as_it_was).__name__, isinstance(as_it_was, hvd._LegacyOptimizer), [
    shown(slope) for slope, _ in as_it_was.compute_gradients(lambda: (rank + 1.0) * variable, [variable])]]
raised = {}
for name, function in ERRORS.items():
    try:
        raised[name] = str(function())
    except Exception as error:  # noqa: BLE001 - what it is, is the question
        raised[name] = [kind.__name__ for kind in type(error).__mro__]
found["after errors"] = shown(hvd.allreduce(base))
found["printed sets"] = [str(each) for each in (*sets, hvd.ProcessSet(range(2)), hvd.global_process_set)]

CLASSES = {
    "common.basics": ["HorovodBasics"], "common.elastic": ["ObjectState", "State"],
    "common.exceptions": ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"],
    "tensorflow": ["Compression", "ProcessSet", "SyncBatchNormalization"],
    "tensorflow.compression": ["Compressor", "FP16Compressor", "NoneCompressor"],
    "tensorflow.elastic": ["TensorFlowKerasState", "TensorFlowState"],
    "tensorflow.keras.callbacks": ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback",
                                   "LearningRateScheduleCallback", "LearningRateWarmupCallback",
                                   "MetricAverageCallback"],
    "tensorflow.keras.elastic": ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback",
                                 "UpdateEpochStateCallback"],
    "keras.callbacks": ["BestModelCheckpoint"],
}


def parameters_of(function):
    """Return the parameters of a function with their defaults; None for other objects."""
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        return None
    return {name: repr(one.default) if isinstance(one.default, (int, float, str, type(None))) else
            "required" if one.default is one.empty else "an object"
            for name, one in inspect.signature(function).parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD}


def members_of(thing):
    """Return the public members; those not from TensorFlow, Keras or Python; and the parameters of methods."""
    cls = thing if inspect.isclass(thing) else type(thing)
    own = {name for base in cls.__mro__ if base.__module__.startswith("horovod.") for name in vars(base)}
    own |= {*vars(thing)} if thing is not cls else set()
    public = {name for name in dir(thing) if not name.startswith("_") or (name == "__init__" and thing is cls)}
    return {"own": sorted(own & public),
            "all": {name: parameters_of(getattr(thing, name, None)) for name in sorted(public)}}


tf.keras.utils.set_random_seed(1)
model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.5)), loss="mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0, steps=0, positions=[])
with tf.GradientTape() as plain:
    value = (rank + 1.0) * variable**2
tape = hvd.DistributedGradientTape(plain)
of_callbacks, of_states = hvd_keras.callbacks, hvd_keras.elastic
OBJECTS = {
    "ProcessSet": mine, "global_process_set": hvd.global_process_set, "optimizer": model.optimizer, "tape": tape,
    "legacy optimizer": hvd_keras.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.5)),
    "optimizer of TensorFlow 1": hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5)),
    "BroadcastGlobalVariablesCallback": of_callbacks.BroadcastGlobalVariablesCallback(0),
    "MetricAverageCallback": of_callbacks.MetricAverageCallback(),
    "LearningRateScheduleCallback": of_callbacks.LearningRateScheduleCallback(0.5, 0.5, start_epoch=1),
    "LearningRateWarmupCallback": of_callbacks.LearningRateWarmupCallback(0.5),
    "CommitStateCallback": of_states.CommitStateCallback(state, 5), "KerasState": state,
    "UpdateBatchStateCallback": of_states.UpdateBatchStateCallback(state),
    "UpdateEpochStateCallback": of_states.UpdateEpochStateCallback(state),
    "TensorFlowState": hvd.elastic.TensorFlowState([variable], batch=0),
    "HostsUpdatedInterrupt": importlib.import_module("horovod.common.exceptions").HostsUpdatedInterrupt(True),
}
members = {f"{module}.{name}": members_of(getattr(importlib.import_module(f"horovod.{module}"), name))
           for module, names in CLASSES.items() for name in names}
members |= {name: members_of(thing) for name, thing in OBJECTS.items()}

optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.25))
with tf.GradientTape() as computing:
    value = (rank + 1.0) * variable
first = optimizer.compute_gradients(value, [variable], tape=computing)
optimizer.minimize(lambda: (rank + 1.0) * variable, [variable])
found["computed"] = [shown(first[0][0]), shown(variable)]
other = tf.Variable(3.0)
with tf.GradientTape() as plain:
    value = (rank + 1.0) * variable * other
partly = hvd.DistributedGradientTape(plain)
partly.register_local_source(variable)
found["apart"] = [[[one is variable, shown(slope)] for one, slope in part] for part in
                  partly.get_local_and_global_gradients(value, [variable, other])]
rates = OBJECTS["LearningRateScheduleCallback"]
found["values"] = [isinstance(tape, tf.GradientTape), str(tape.process_set), tape.scale_local_gradients,
                   str(model.optimizer.process_set), model.optimizer.scale_local_gradients, state.model is model,
                   state.optimizer is model.optimizer, state.steps, OBJECTS["TensorFlowState"].variables[0] is variable,
                   OBJECTS["TensorFlowState"].session, OBJECTS["HostsUpdatedInterrupt"].skip_sync,
                   OBJECTS["CommitStateCallback"].batches_remaining, OBJECTS["UpdateEpochStateCallback"].initial_epoch,
                   hasattr(rates.backend, "epsilon"), hasattr(state.backend, "epsilon"),
                   [rates.multiplier(epoch) for epoch in (1, 2, 4)]]
with open(f"{sys.argv[1]}.{rank}.json", "w") as file:
    json.dump([found, raised, members], file)
hvd.shutdown()
