"""Alias module for `horovod.tensorflow.sync_batch_norm`."""

from __future__ import annotations

from typing import Any

from hvkeras.collectives.operations import Sum
from hvkeras.job.queries import rank, size
from hvkeras.training.sync_batch_norm import sync_batch_normalization

__all__ = ["Sum", "SyncBatchNormalization", "rank", "size"]  # noqa: F822 - see __getattr__


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # the class depends on the Keras version, which is chosen on first use
        return sync_batch_normalization()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
