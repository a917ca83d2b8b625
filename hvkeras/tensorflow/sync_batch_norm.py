"""Alias module for `horovod.tensorflow.sync_batch_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvkeras.collectives.operations import Sum
from hvkeras.job.queries import rank, size
from hvkeras.training.sync_batch_norm import sync_batch_normalization

__all__ = ["Sum", "SyncBatchNormalization", "rank", "size"]

if TYPE_CHECKING:
    from hvkeras.training.sync_batch_norm import SyncBatchNormalization
else:

    def __getattr__(name: str) -> Any:
        if name == "SyncBatchNormalization":  # the class depends on the Keras version, which is chosen on first use
            return sync_batch_normalization()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
