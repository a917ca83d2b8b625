"""Alias module for `horovod.keras.elastic`."""

from __future__ import annotations

from hvkeras.elastic import KerasState, TensorFlowKerasState, run
from hvkeras.elastic.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = ["CommitStateCallback", "KerasState", "TensorFlowKerasState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "run"]
