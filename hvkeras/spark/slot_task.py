"""Task of an elastic job on Spark: a slot that runs one rank after another."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.horovod import as_horovod
from hvkeras.host.gpus import VISIBLE
from hvkeras.launcher.reported_job import serve
from hvkeras.spark.elastic_job import SlotOrder
from hvkeras.spark.task import visible_devices

LAUNCHER = "Spark"


def run(order: SlotOrder) -> Iterator[bytes]:
    """Run ranks of the job until it ends.

    Yields:
        The pickled results of the ranks that ran here.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    addresses = {name: resource.addresses for name, resource in task.resources().items()}
    variables = {**order.environment, hvkeras_run.STARTED_BY: LAUNCHER}
    devices = visible_devices(order.gpus, task.partitionId(), addresses, os.environ)
    if devices is not None:
        variables[VISIBLE] = devices
    if order.as_horovod:
        variables = {**as_horovod.environment({**os.environ, **variables})}
    index = task.attemptNumber() * 10_000 + task.partitionId()
    yield pickle.dumps(serve(order.address, order.secret, index, order.call, variables, order.commits))
