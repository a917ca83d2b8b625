"""Measures the time from submit to the first training step under each scheduler, beside the scheduler's own minimum.

    .venv-clusters/bin/python tests/clusters/start_times.py [TIMES [Ray|Spark]]

Prints a table in Markdown: medians in seconds, of two cold ranks on `tfdist`. Slurm's two nodes are network namespaces;
Spark's session and its Python workers run already. With a name, that scheduler alone is measured, and `hvkeras run`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `harness`, as pytest does

from clusters import slurm_cluster
from harness.launchers import BIN, clean_environment

FIRST_STEP = """
import keras
import numpy as np
import hvkeras as hvd

hvd.init("tfdist")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(np.ones((4, 8)), np.ones((4, 1)), batch_size=4, epochs=1, verbose=0)
if hvd.rank() == 0:
    print("FIRST STEP", flush=True)
"""
ON_RAY = """
import sys, time
import ray
from hvkeras.ray import RayExecutor

def nothing():
    return 0

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
script = open(sys.argv[1]).read()
for function in (nothing, lambda: exec(script, {})):
    began = time.monotonic()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()
    executor.run(function)
    print(time.monotonic() - began, flush=True)
    executor.shutdown()
"""
ON_SPARK = """
import sys, time
from pyspark.sql import SparkSession
import hvkeras.spark

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
script = open(sys.argv[1]).read()

def barrier():
    tasks = spark.sparkContext.parallelize(range(2), 2).barrier()
    tasks.mapPartitions(lambda _: [0]).collect()

barrier()  # starts Spark's own Python workers
hvkeras.spark.run(lambda: 0, num_proc=2)  # and those of hvkeras
for job in (barrier, lambda: hvkeras.spark.run(lambda: exec(script, {}), num_proc=2, verbose=0)):
    began = time.monotonic()
    job()
    print(time.monotonic() - began, flush=True)
"""


def timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def command(folder: Path, *arguments: str) -> Callable[[], object]:
    """Runs a command line to its end."""
    environment = clean_environment(folder) | {"HVKERAS_START_TIMEOUT": "120"}
    return lambda: subprocess.run(arguments, cwd=folder, env=environment, check=True, capture_output=True, timeout=300)


def main() -> None:
    """Measures, and prints the table."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    chosen = sys.argv[2] if len(sys.argv) > 2 else ""
    rows: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "first_step.py"
        script.write_text(FIRST_STEP)
        launchers = {"hvkeras run": [str(BIN / "hvkeras"), "run", "-np", "2"]}
        if not chosen and (BIN / "torchrun").exists():
            launchers["torchrun"] = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
        for title, start in launchers.items():
            rows[title] = ([timed(command(folder, *start, "true")) for _ in range(times)],
                           [timed(command(folder, *start, sys.executable, str(script))) for _ in range(times)])
        sessions = {"Ray": ON_RAY, "Spark": ON_SPARK}
        for title, source in sessions.items() if not chosen else [(chosen, sessions[chosen])]:
            session = folder / f"on_{title}.py"
            session.write_text(source)
            environment = clean_environment(folder) | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
            found = [subprocess.run([sys.executable, str(session), str(script)], cwd=folder, timeout=300, check=True,
                                    env=environment, capture_output=True, text=True).stdout.split()
                     for _ in range(times)]
            rows[title] = ([float(least) for least, _ in found], [float(whole) for _, whole in found])
        if not chosen and not slurm_cluster.missing():
            with slurm_cluster.cluster(folder) as slurm:
                srun = ("srun", "-N2", "-n2")
                rows["srun"] = ([timed(lambda: slurm.command(*srun, "true")) for _ in range(times)],
                                [timed(lambda: slurm.command(*srun, sys.executable, str(script), deadline=200))
                                 for _ in range(times)])
    print(f"{os.cpu_count()} cores, {times} times each\n\n| scheduler | its minimum | to the first step |\n"
          "| --- | --- | --- |")
    for title, (least, whole) in rows.items():
        print(f"| {title} | {statistics.median(least):.2f} | {statistics.median(whole):.1f} |")


if __name__ == "__main__":
    main()
