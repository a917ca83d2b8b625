"""Averages the moving statistics of BatchNormalization over the ranks, at points that all ranks reach anyway.

Each rank updates its statistics from its own batches, and no gradient keeps them equal. `tf.distribute` also takes the
mean over the replicas, whenever the statistics are read or saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Average
from hvkeras.collectives.reductions import allreduce
from hvkeras.job.process_sets import ProcessSet


def average(model: Any, process_set: ProcessSet, local: Collection[Any], what: str) -> None:
    """Gives all ranks the mean of their moving statistics, in one collective; all ranks must call it.

    Args:
        model: The model.
        process_set: The ranks that train it.
        local: Keys of variables that are local to each rank.
        what: The call in which they are averaged, for messages.
    """
    shared = [variable for variable in compat.batch_norm_statistics(model)
              if compat.variable_key(variable) not in local]
    if not shared:
        return
    parts = [compat.local_parts(variable) for variable in shared]  # one for each replica of a strategy
    wide = tf.float64 if any(replicas[0].dtype == tf.float64 for replicas in parts) else tf.float32
    mine = tf.concat([tf.reshape(tf.add_n([tf.cast(part, wide) for part in replicas]) / len(replicas), [-1])
                      for replicas in parts], 0)
    name = f"the moving statistics of BatchNormalization in {what}"
    means = tf.split(allreduce(mine, op=Average, name=name, process_set=process_set),
                     [int(replicas[0].shape.num_elements()) for replicas in parts])
    for replicas, mean in zip(parts, means, strict=True):
        for part in replicas:
            part.assign(tf.cast(tf.reshape(mean, part.shape), part.dtype))
