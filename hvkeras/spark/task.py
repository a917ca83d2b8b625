"""Horovod's path for what a rank asks about its Spark task."""

from __future__ import annotations

from hvkeras.spark.order import Gpus


def get_available_devices() -> list[str]:
    """Returns the addresses of the GPUs that Spark has given to this rank's task.

    They are in CUDA_VISIBLE_DEVICES already.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    given = {} if context is None else context.resources()
    return list(given[Gpus().resource].addresses) if Gpus().resource in given else []
