"""The twin of `horovod.tensorflow.functions`."""

from __future__ import annotations

from hvkeras.functions import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]
