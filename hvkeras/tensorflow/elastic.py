"""The twin of `horovod.tensorflow.elastic`."""

from __future__ import annotations

from hvkeras.context import init, shutdown
from hvkeras.elastic import ObjectState, TensorFlowKerasState, TensorFlowState, run, run_fn
from hvkeras.errors import HorovodInternalError
from hvkeras.functions import broadcast_object, broadcast_object_fn, broadcast_variables
from hvkeras.numbers import rank

__all__ = ["HorovodInternalError", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "broadcast_object",
           "broadcast_object_fn", "broadcast_variables", "init", "rank", "run", "run_fn", "shutdown"]
