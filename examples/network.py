"""The small convolutional network that the examples train."""

from __future__ import annotations

from typing import Any

import keras


def convolutional_network(input_shape: tuple[int, ...], classes: int = 10) -> Any:
    """Return a new network, whose outputs are logits of shape `[N, classes]`."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(classes),
        ]
    )
