"""Simulated GPUs in TensorFlow's device list, to test the choice of GPUs on a machine without any."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

import hvkeras as hvd


def pretend(count: int) -> None:
    """Add `count` GPUs to the list of physical devices. When TensorFlow initializes, it only finds the CPU."""
    tf.config.list_physical_devices()
    found = context.context()
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(count)]
    found._physical_devices += gpus
    found._visible_device_list += gpus
    found._memory_growth_map.update(dict.fromkeys(gpus))


def said_when_crossed(rank: int) -> dict[str, list[str]]:
    """Return the errors of each kind of collective when ranks run two of them in different orders.

    The last entry is from a graph.
    """
    kinds = {
        "sum": functools.partial(hvd.allreduce, op=hvd.Sum), "min": functools.partial(hvd.allreduce, op=hvd.Min),
        "product": functools.partial(hvd.allreduce, op=hvd.Product), "gather": hvd.allgather,
        "broadcast": functools.partial(hvd.broadcast, root_rank=0), "scatter": hvd.reducescatter,
        "all to all": hvd.alltoall}

    def both(run: Any, dtype: str) -> list[str]:
        messages = []
        for name in ("one", "two")[:: -1 if rank else 1]:
            try:
                run(tf.ones([2, 2], dtype), name=name)
            except hvd.MismatchError as error:
                messages.append(str(error))
        return messages

    found = {kind: both(run, "float32") for kind, run in kinds.items()}
    found["half"] = both(hvd.allreduce, "float16")
    try:
        tf.function(lambda: both(hvd.allreduce, "float32"))()
    except tf.errors.InvalidArgumentError as error:
        found["in a graph"] = [str(error)]
    return found
