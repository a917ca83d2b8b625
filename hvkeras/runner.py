"""Alias module for `horovod.runner`: functions on several processes."""

from __future__ import annotations

from hvkeras.launcher.functions import run

__all__ = ["run"]
