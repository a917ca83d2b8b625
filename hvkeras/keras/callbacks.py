"""The twin of `horovod.keras.callbacks`."""

from __future__ import annotations

from hvkeras.callbacks import BroadcastGlobalVariablesCallback

__all__ = ["BroadcastGlobalVariablesCallback"]
