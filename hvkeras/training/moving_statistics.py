"""Average of moving statistics over the ranks, where all ranks are at the same step anyway.

Each rank updates its statistics from its own batches, and no gradient keeps them equal. `tf.distribute` also takes the
mean over the replicas whenever the statistics are read or saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, TypeVar

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Average
from hvkeras.collectives.reductions import allreduce
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

StatisticT = TypeVar("StatisticT")


class _Registered:
    """Layers, classes and variables that users have registered as moving statistics."""

    layers: weakref.WeakSet[Any] = weakref.WeakSet()  # noqa: RUF012 - one per process on purpose
    classes: set[type] = set()  # noqa: RUF012
    keys: set[Any] = set()  # noqa: RUF012


def register_statistic(layer_or_variable: StatisticT) -> StatisticT:
    """Let `fit` average a moving statistic over the ranks, as it does for BatchNormalization.

    A layer may assign to a variable in its `call`, such as a running mean or a codebook. Each rank then computes the
    variable from its own batches. `fit` averages its floating-point variables that no optimizer trains: before
    validation, and at the end of each epoch before callbacks save. In between, they differ between the ranks. For the
    same result as one process in each step, reduce the assigned value with `hvd.allreduce` instead.

    Example:
        codebook = hvd.register_statistic(VectorQuantizer(512))

        @hvd.register_statistic  # all layers of the class, also of models that are loaded from files
        class RunningMean(keras.layers.Layer): ...

    Args:
        layer_or_variable: A layer, built or not, with its sublayers; a class of layers; or a variable.

    Returns:
        The argument.

    Raises:
        UsageError: The argument is something else, or an integer variable.
    """
    target: Any = layer_or_variable
    is_layer = all(hasattr(target if isinstance(target, type) else type(target), name) for name in ("call", "weights"))
    if is_layer and isinstance(target, type):
        _Registered.classes.add(target)
    elif is_layer:
        _Registered.layers.add(target)
    elif hasattr(target, "assign") and hasattr(target, "dtype") and tf.as_dtype(target.dtype).is_floating:
        _Registered.keys.add(compat.variable_key(target))
    else:
        raise UsageError(explain("A moving statistic is a floating-point variable, or all of a layer or a class of"
                                 " layers", "pass the layer", layer_or_variable=target))
    return layer_or_variable


def is_statistic(untrained: compat.UntrainedVariable) -> bool:
    """Return whether a variable is a moving statistic: by its name in Keras, or because the user registered it."""
    return untrained.is_statistic or untrained.key in _Registered.keys or any(
        layer in _Registered.layers or isinstance(layer, tuple(_Registered.classes)) for layer in untrained.layers)


def statistics_of(model: Any, local: Collection[Any]) -> list[Any]:
    """Return the moving statistics of a model, except for variables that are local to each rank."""
    return [one.variable for one in compat.kept_variables(model) if is_statistic(one) and one.key not in local]


def average(model: Any, process_set: ProcessSet, local: Collection[Any], what: str) -> None:
    """Average moving statistics over all ranks, in one collective; all ranks must call it.

    Args:
        local: Keys of variables that are local to each rank.
        what: The call that averages them, for messages.
    """
    shared = statistics_of(model, local)
    if not shared:
        return
    parts = [compat.local_parts(variable) for variable in shared]  # one for each replica of a strategy
    dtype = tf.float64 if any(replicas[0].dtype == tf.float64 for replicas in parts) else tf.float32
    mine = tf.concat([tf.reshape(tf.add_n([tf.cast(part, dtype) for part in replicas]) / len(replicas), [-1])
                      for replicas in parts], 0)
    means = tf.split(allreduce(mine, op=Average, name=f"the moving statistics in {what}", process_set=process_set),
                     [int(replicas[0].shape.num_elements()) for replicas in parts])
    for replicas, mean in zip(parts, means, strict=True):
        for part in replicas:
            part.assign(tf.cast(tf.reshape(mean, part.shape), part.dtype))
    compat.derive_statistics(model, local)
