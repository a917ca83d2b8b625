"""Measures the time from submit to the first training step under each scheduler, beside the scheduler's own minimum.

    .venv-clusters/bin/python tests/clusters/start_times.py [TIMES]

Prints a table in Markdown: medians in seconds, of two cold ranks on `tfdist`. Slurm's two nodes are network namespaces.
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
    rows: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script, ray_script = folder / "first_step.py", folder / "on_ray.py"
        script.write_text(FIRST_STEP)
        ray_script.write_text(ON_RAY)
        launchers = {"hvkeras run": [str(BIN / "hvkeras"), "run", "-np", "2"]}
        if (BIN / "torchrun").exists():
            launchers["torchrun"] = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
        for title, start in launchers.items():
            rows[title] = ([timed(command(folder, *start, "true")) for _ in range(times)],
                           [timed(command(folder, *start, sys.executable, str(script))) for _ in range(times)])
        found = [subprocess.run([sys.executable, str(ray_script), str(script)], cwd=folder, timeout=300, check=True,
                                env=clean_environment(folder), capture_output=True, text=True).stdout.split()
                 for _ in range(times)]
        rows["Ray"] = ([float(least) for least, _ in found], [float(whole) for _, whole in found])
        if not slurm_cluster.missing():
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
