"""Alias module for `horovod.common.exceptions`."""

from __future__ import annotations

from hvkeras.errors import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
