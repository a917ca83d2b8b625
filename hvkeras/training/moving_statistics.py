"""Averages moving statistics over the ranks, at points that all ranks reach anyway.

Each rank updates its statistics from its own batches, and no gradient keeps them equal. `tf.distribute` also takes the
mean over the replicas, whenever the statistics are read or saved.
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
from hvkeras.training.sketches import first_diverged, sketches, spread

StatisticT = TypeVar("StatisticT")


class _Registered:
    """What users have registered, besides the statistics of Keras's own layers."""

    layers: weakref.WeakSet[Any] = weakref.WeakSet()  # noqa: RUF012 - one per process on purpose
    classes: set[type] = set()  # noqa: RUF012
    keys: set[Any] = set()  # noqa: RUF012


def register_statistic(layer_or_variable: StatisticT) -> StatisticT:
    """Lets `fit` average a moving statistic over the ranks, as it does with those of BatchNormalization.

    A layer that assigns to a variable in its `call`, such as a running mean or a codebook, computes it on each rank
    from that rank's batches. Averaged are floating-point variables that no optimizer trains: before validation and at
    the end of each epoch, before callbacks save. In between they differ between the ranks. A layer that is to compute
    the same in each step as one process does reduces what it assigns by `hvd.allreduce` instead.

    Example:
        codebook = hvd.register_statistic(VectorQuantizer(512))

        @hvd.register_statistic  # all layers of the class, also of models that are loaded from files
        class RunningMean(keras.layers.Layer): ...

    Args:
        layer_or_variable: A layer, which need not be built yet, with the layers in it; a class of layers; or a
            variable.

    Returns:
        The argument.

    Raises:
        UsageError: The argument is something else, or a variable of integers.
    """
    given: Any = layer_or_variable
    is_layer = all(hasattr(given if isinstance(given, type) else type(given), name) for name in ("call", "weights"))
    if is_layer and isinstance(given, type):
        _Registered.classes.add(given)
    elif is_layer:
        _Registered.layers.add(given)
    elif hasattr(given, "assign") and hasattr(given, "dtype") and tf.as_dtype(given.dtype).is_floating:
        _Registered.keys.add(compat.variable_key(given))
    else:
        raise UsageError(explain("A moving statistic is a floating-point variable, or all of a layer or a class of"
                                 " layers", "pass the layer", layer_or_variable=given))
    return layer_or_variable


def is_statistic(kept: compat.UntrainedVariable) -> bool:
    """Whether a variable is a moving statistic: Keras names it as one, or the user has registered it."""
    return kept.is_statistic or kept.key in _Registered.keys or any(
        layer in _Registered.layers or isinstance(layer, tuple(_Registered.classes)) for layer in kept.layers)


def statistics_of(model: Any, local: Collection[Any]) -> list[Any]:
    """Returns the moving statistics of a model, except for variables that are local to each rank."""
    return [one.variable for one in compat.kept_variables(model) if is_statistic(one) and one.key not in local]


def average(model: Any, process_set: ProcessSet, local: Collection[Any], what: str) -> None:
    """Gives all ranks the mean of their moving statistics, in one collective; all ranks must call it.

    Args:
        model: The model.
        process_set: The ranks that train it.
        local: Keys of variables that are local to each rank.
        what: The call in which they are averaged, for messages.
    """
    shared = statistics_of(model, local)
    if not shared:
        return
    parts = [compat.local_parts(variable) for variable in shared]  # one for each replica of a strategy
    wide = tf.float64 if any(replicas[0].dtype == tf.float64 for replicas in parts) else tf.float32
    mine = tf.concat([tf.reshape(tf.add_n([tf.cast(part, wide) for part in replicas]) / len(replicas), [-1])
                      for replicas in parts], 0)
    means = tf.split(allreduce(mine, op=Average, name=f"the moving statistics in {what}", process_set=process_set),
                     [int(replicas[0].shape.num_elements()) for replicas in parts])
    for replicas, mean in zip(parts, means, strict=True):
        for part in replicas:
            part.assign(tf.cast(tf.reshape(mean, part.shape), part.dtype))
    compat.derive_statistics(model, local)


def average_if_renewed(model: Any, process_set: ProcessSet, local: Collection[Any], what: str) -> None:
    """Averages moving statistics that were computed again on each rank, outside of the steps of `fit`.

    Nothing is done if the ranks hold different weights, as after one rank alone has loaded its best ones: their mean
    would fit none of them. All ranks must call it.

    Args:
        model: The model.
        process_set: The ranks that train it.
        local: Keys of variables that are local to each rank.
        what: The call in which they are averaged, for messages.
    """
    kept = [one for one in compat.kept_variables(model) if one.key not in local]
    indices = [index for index, one in enumerate(kept) if is_statistic(one)]
    if not indices:
        return
    mine = tf.gather(sketches(model, "kept", [one.variable for one in kept]), indices)
    high, low, _ = spread(mine, f"the moving statistics in {what}", process_set)
    if first_diverged(high, low, 0) is None:
        return
    trained = [one for one in model.trainable_variables
               if compat.variable_key(one) not in local and tf.as_dtype(one.dtype).is_floating]
    high, low, _ = spread(sketches(model, "trained", trained), f"the weights in {what}", process_set)
    if first_diverged(high, low, 0) is None:
        average(model, process_set, local, what)
