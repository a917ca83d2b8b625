"""Alias module for `horovod.tensorflow.elastic`."""

from __future__ import annotations

from hvkeras.collectives.broadcasts import broadcast_object, broadcast_object_fn, broadcast_variables
from hvkeras.elastic import ObjectState, TensorFlowKerasState, TensorFlowState, run, run_fn
from hvkeras.errors import HorovodInternalError
from hvkeras.job.queries import rank
from hvkeras.startup import init, shutdown

__all__ = ["HorovodInternalError", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "broadcast_object",
           "broadcast_object_fn", "broadcast_variables", "init", "rank", "run", "run_fn", "shutdown"]
