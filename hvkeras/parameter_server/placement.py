"""Placement of variables: each is placed as a whole on the parameter server that holds the least data so far.

Keras 3's variables cannot be sharded. `variable_partitioner` creates a `ShardedVariable`, which has no `handle`, and
Keras's `Variable` treats it as a `tf.Variable`: `GradientTape.gradient` fails on the first weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def balanced_over(strategy: Any, servers: int) -> Iterator[None]:
    """Enters a strategy's scope, and places the variables created in it by their size.

    Args:
        strategy: A `ParameterServerStrategy`.
        servers: The number of its parameter servers.
    """
    loads = dict.fromkeys(range(servers), 0)
    anchors: list[Any] = []

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        if options.get("colocate_with") is None:  # optimizer slots are placed with their variables
            options["colocate_with"] = anchors[min(loads, key=lambda server: loads[server])]
        variable = next_creator(**options)
        loads[server_of(variable)] += _size(variable)
        return variable

    with strategy.scope():
        anchors += [tf.Variable(0, trainable=False, name=f"anchor_{number}") for number in range(servers)]
        anchors.sort(key=server_of)
        with tf.variable_creator_scope(create):
            yield


def server_of(variable: Any) -> int:
    """Returns the number of the parameter server that holds a `tf.Variable`."""
    return int(tf.DeviceSpec.from_string(variable.device).task)


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape.as_list(), dtype=np.int64)) * int(variable.dtype.size)
