"""A callback that ends training in the middle."""

from __future__ import annotations

from typing import Any

import keras


class CutOffError(Exception):
    """What the callback raises."""


class CutOff(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends training after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts."""
        self.left -= 1
        if self.left < 0:
            raise CutOffError
