"""Ranks of tfdist that share one GPU over NCCL: called before anything else of TensorFlow is used.

NCCL refuses two ranks on one GPU of one host, so each rank names a host of its own. hvkeras leaves a GPU alone that is
not enough for all ranks, so its choice of the GPU is replaced; all else is hvkeras as it is.
"""

from __future__ import annotations

import os
from typing import Any

from harness.launchers import announced_rank
from hvkeras.backends.tfdist.cluster import Cluster


def share() -> None:
    """Has this rank take the GPU that it sees, whichever other ranks do."""
    os.environ["NCCL_HOSTID"] = f"rank{announced_rank(os.environ) or 0}"

    def pin(self: Any, tf: Any, start: Any) -> list[Any]:
        gpus: list[Any] = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        return gpus

    Cluster._pin_gpu = pin  # type: ignore[method-assign]
