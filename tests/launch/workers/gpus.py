"""Choice of GPUs by ranks, with simulated GPUs (`harness.gpus`).

Arguments: the number of GPUs per rank, and what the script does: `pins` rank 1 to GPU 1 and rank 0 to GPU 0 in the
other order, `hides` GPUs, `limits` memory, `starts` TensorFlow first, `horovod` (its lines after init()), `apart` (each
rank on a separate host), and `fewer` (rank 1 has none). With `crosses`, ranks run collectives in different orders.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from harness.gpus import pretend, said_when_crossed
from harness.launchers import announced_rank
from hvkeras.backends import tfdist
from hvkeras.job import session_start
from hvkeras.job.session import current_session

COUNT, SCRIPT = int(sys.argv[1]), sys.argv[2:]
RANK = announced_rank(os.environ) or 0


@check
def place() -> dict[str, Any]:
    """Return the rank's devices, and the transport of its tensors."""
    gpus = tf.config.list_physical_devices("GPU")
    return {"visible": [gpu.name[-1] for gpu in tf.config.get_visible_devices("GPU")],
            "growth": [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus],
            "backend": current_session().backend.name, "transport": current_session().backend.transport}


@check
def collective() -> float:
    """Return a sum; on the CPU if NCCL would run it."""
    if current_session().backend.transport == "NCCL":
        current_session().backend._cluster.device = "/CPU:0"
    return float(hvd.allreduce(tf.constant(RANK + 1.0), op=hvd.Sum))


@check
def crossed() -> dict[str, list[str]]:
    """Errors of collectives that NCCL would combine by their order; the last one is from a graph."""
    current_session().backend._cluster.device = "/CPU:0"
    numbers = itertools.count(1)
    tfdist._instance = lambda key, tensor: next(numbers)  # as with NCCL, the order determines which collectives match
    return said_when_crossed(RANK)


def start() -> None:
    pretend(0 if "fewer" in SCRIPT and RANK else COUNT)
    gpus = tf.config.list_physical_devices("GPU")
    if "pins" in SCRIPT:
        tf.config.set_visible_devices(gpus[1 - RANK], "GPU")
    if "hides" in SCRIPT:
        tf.config.set_visible_devices([], "GPU")
    if "limits" in SCRIPT:
        for gpu in gpus:
            tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=1024)])
    if "starts" in SCRIPT:
        tf.constant(1.0)
    if "apart" in SCRIPT:
        session_start.host_identity = lambda: f"host {RANK}"
    hvd.init()
    if "horovod" in SCRIPT:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")


if __name__ == "__main__":
    run_checks(before=start, after=hvd.shutdown, chosen={"crossed"} if "crosses" in SCRIPT else {"place", "collective"})
