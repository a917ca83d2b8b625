"""Alias module for `horovod.common.elastic`."""

from __future__ import annotations

from hvkeras.elastic import ObjectState, State, run_fn
from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
