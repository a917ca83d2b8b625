"""Collectives and training of ranks on the GPUs that `hvd.init()` gives them; returns what the tests compare.

Arguments: cases of `same_training.py`; `--share` for tfdist over NCCL on one GPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from harness.launchers import announced_rank
from hvkeras.job.session import current_session
from parallel.workers import same_training

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
assert same_training.differences  # `fit` beside one process: a check that importing it has registered


def start() -> None:
    """Joins the job; with `--share`, NCCL takes the ranks for hosts, as it refuses two ranks of one host on one GPU."""
    if "--share" in sys.argv:
        os.environ["NCCL_HOSTID"] = f"rank{announced_rank(os.environ) or 0}"
    hvd.init()


@check
def place() -> dict[str, Any]:
    """Which GPU this rank has, and where TensorFlow puts a tensor."""
    visible = [device.name for device in tf.config.get_visible_devices("GPU")]
    return {"local_rank": hvd.local_rank(), "visible": visible, "device": (tf.random.normal([4]) * 2).device,
            "backend": current_session().backend.name, "engine": current_session().backend.engine,
            "transport": current_session().backend.transport}


def _tensor(rank: int, dtype: str, device: str = "/CPU:0") -> Any:
    """A rank's tensor, in numbers that every dtype holds exactly."""
    with tf.device(device):
        return tf.cast(tf.reshape(tf.range(12.0) + 10.0 * rank, [6, 2]), dtype)


def _collectives(dtype: str, device: str) -> dict[str, Any]:
    mine = _tensor(hvd.rank(), dtype, device)
    return {"sum": hvd.allreduce(mine, op=hvd.Sum), "max": hvd.allreduce(mine, op=hvd.Max),
            "gathered": hvd.allgather(mine), "sent": hvd.broadcast(mine, 1),
            "exchanged": hvd.alltoall(mine, splits=[6 // hvd.size()] * hvd.size()),
            "scattered": hvd.reducescatter(mine, op=hvd.Sum)}


def _expected(dtype: str) -> dict[str, Any]:
    everything = [np.asarray(tf.cast(_tensor(rank, dtype), tf.float64)) for rank in range(hvd.size())]
    rows = 6 // hvd.size()
    mine = slice(hvd.rank() * rows, (hvd.rank() + 1) * rows)
    return {"sum": sum(everything), "max": np.max(everything, axis=0), "gathered": np.concatenate(everything),
            "sent": everything[1], "exchanged": np.concatenate([each[mine] for each in everything]),
            "scattered": sum(everything)[mine]}


@check
def collectives() -> list[str]:
    """Every collective on tensors in the GPU's memory and the host's, eagerly and in one graph: what NumPy has not."""
    wrong = []
    devices = ("/GPU:0", "/CPU:0") if tf.config.get_visible_devices("GPU") else ("/CPU:0",)
    for dtype in DTYPES:
        expected = _expected(dtype)
        for device in devices if hvd.rank() == 0 or dtype != "int64" else devices[::-1]:
            for way, run in (("eagerly", _collectives), ("in a graph", tf.function(_collectives))):
                for name, found in run(dtype, device).items():
                    values = found[0] if isinstance(found, (list, tuple)) else found
                    if not np.array_equal(np.asarray(tf.cast(values, tf.float64)), expected[name]):
                        wrong.append(f"{name} of {dtype} on {device} {way}")
    return wrong


if __name__ == "__main__":
    run_checks(before=start, after=hvd.shutdown)
