"""A driver on a standalone cluster of two hosts: `python spark_cluster.py MASTER ADDRESS HOST [CHECK...]`.

HOST is the network namespace of the second host. Each worker has addresses of four GPUs, which do not exist.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

import hvkeras as hvd
from harness.checks import check, run_checks
from harness.hosts import CABLE
from hvkeras.spark import MirroredStrategyRunner

MASTER, ADDRESS, SECOND = sys.argv[1:4]
settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.host": ADDRESS,
            "spark.executor.memory": "1g", "spark.executor.resource.gpu.amount": "4",
            "spark.task.resource.gpu.amount": "2"}
builder = SparkSession.builder.master(MASTER)
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
context = spark.sparkContext
context.setLogLevel("OFF")


@check
def ranks_of_a_host_are_neighbours_and_reduce_between_hosts():
    out = io.StringIO()

    def train() -> Any:
        import hvkeras as hvd
        from hvkeras.job.session import current_session

        hvd.init()
        total = float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum))
        print(f"the sum is {total}")
        return (hvd.rank(), socket.gethostname().partition("-")[0], hvd.local_rank(), hvd.local_size(),
                hvd.cross_rank(), os.environ["CUDA_VISIBLE_DEVICES"], total, current_session().backend.name)

    return hvd.spark.run(train, num_proc=4, stdout=out), sorted(out.getvalue().splitlines())


@check
def gpus_of_spark_are_spread_over_the_tasks():
    def devices() -> Any:
        return BarrierTaskContext.get().allGather(os.environ["CUDA_VISIBLE_DEVICES"]), os.environ["TF_CONFIG"]

    runner = MirroredStrategyRunner(num_slots=5, use_custom_strategy=True)
    seen, config = runner.run(devices)
    hidden, _ = MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True).run(devices)
    workers = json.loads(config)["cluster"]["worker"]
    return runner.get_num_tasks(), seen, hidden, sorted({address.partition(":")[0] for address in workers})


@check
def a_host_that_is_cut_off_is_named():
    out = io.StringIO()

    def wait() -> None:
        import hvkeras as hvd

        hvd.init()
        print(hvd.rank())
        hvd.allreduce(1.0) if hvd.rank() < 2 else time.sleep(60)

    def cut_off() -> None:
        while out.getvalue().count("\n") < 4:
            time.sleep(0.1)
        subprocess.run(["ip", "-n", SECOND, "link", "set", CABLE, "down"], check=True)

    cutter = threading.Thread(target=cut_off)
    cutter.start()
    began = time.monotonic()
    try:
        hvd.spark.run(wait, num_proc=4, stdout=out, env={"HVKERAS_LIVENESS_TIMEOUT": "4"})
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        cutter.join()
        subprocess.run(["ip", "-n", SECOND, "link", "set", CABLE, "up"], check=True)
    return None


@check
def other_versions_on_a_host_are_named():
    try:
        hvd.spark.run(os.getpid, num_proc=4)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


if __name__ == "__main__":
    run_checks(after=spark.stop, chosen=sys.argv[4:])
