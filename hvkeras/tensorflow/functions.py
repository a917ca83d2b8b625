"""Alias module for `horovod.tensorflow.functions`."""

from __future__ import annotations

from hvkeras.collectives.broadcasts import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from hvkeras.tensorflow import util

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]

_executing_eagerly = util._executing_eagerly  # as in Horovod; scripts import it from here
