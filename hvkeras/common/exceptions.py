"""Alias module for `horovod.common.exceptions`."""

from __future__ import annotations

from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
