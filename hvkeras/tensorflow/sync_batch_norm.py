"""The twin of `horovod.tensorflow.sync_batch_norm`."""

from __future__ import annotations

from typing import Any

from hvkeras.batch_norm import sync_batch_normalization
from hvkeras.numbers import rank, size
from hvkeras.operations import Sum

__all__ = ["Sum", "SyncBatchNormalization", "rank", "size"]  # noqa: F822 - see __getattr__


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # it belongs to one Keras, which is chosen when it is first used
        return sync_batch_normalization()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
