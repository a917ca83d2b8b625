"""Elastic training, which resumes from the last commit after a rank is lost.

A state holds everything that training resumes from. `run` restores the last commit on every rank and calls the
training function. `hvkeras run --reset-limit N` restarts all ranks when one is lost:
docs/decisions/elastic-starts-all-ranks-again.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvkeras.errors import require_tensorflow

require_tensorflow()

from hvkeras.elastic.batches import batches
from hvkeras.elastic.running import run, run_fn
from hvkeras.elastic.state import ObjectState, State
from hvkeras.elastic.tensorflow_state import KerasState, TensorFlowKerasState, TensorFlowState
from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["CommitStateCallback", "ElasticCallback", "HorovodInternalError", "HostsUpdatedInterrupt", "KerasState",
           "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "batches", "run", "run_fn"]


if TYPE_CHECKING:
    from hvkeras.elastic.callbacks import (
        CommitStateCallback,
        ElasticCallback,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            # Imported on first use: importing them selects a version of Keras.
            from hvkeras.elastic import callbacks  # noqa: PLC0415

            return getattr(callbacks, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
