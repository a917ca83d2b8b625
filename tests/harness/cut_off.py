"""Callback that aborts training."""

from __future__ import annotations

from typing import Any

import keras


class CutOffError(Exception):
    """Raised by the callback."""


class CutOff(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that raises `CutOffError` after a number of steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise CutOffError
