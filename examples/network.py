"""The small convolutional network that both examples train, and how well it does."""

from __future__ import annotations

from typing import Any

import keras

import hvkeras as hvd


def convolutional_network(input_shape: tuple[int, ...], classes: int = 10) -> Any:
    """Makes the network; its outputs are logits."""
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


def accuracy(model: Any, images: Any, labels: Any) -> float:
    """The share of images that the model gets right: each rank looks at its own part, and the counts are added up."""
    images, labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    guesses = model.predict(images, batch_size=256, verbose=0).argmax(axis=-1)
    right, total = hvd.allreduce([float((guesses == labels).sum()), float(len(labels))], op=hvd.Sum).numpy()
    return float(right / total)
