"""Models and optimizers for benchmarks of training steps, with synthetic batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Batch = tuple[Any, Any]  # samples [batch, ...] float32, labels [batch, ...] int32


@dataclass(frozen=True)
class ModelSpec:
    """A model to train.

    Attributes:
        name: Name on the command line.
        build: Builds the model, which returns logits.
        shape: Shape of a sample.
        labels: Shape of a sample's labels.
        batch: Samples per rank and step.
    """

    name: str
    build: Callable[[], Any]
    shape: Sequence[int]
    labels: Sequence[int]
    classes: int
    batch: int

    def data(self, rank: int) -> Batch:
        """Return a random, reproducible batch for a rank."""
        random = np.random.default_rng(rank)
        return (random.standard_normal((self.batch, *self.shape), np.float32),
                random.integers(0, self.classes, (self.batch, *self.labels), np.int32))


def _keras() -> Any:
    from hvkeras import compat  # noqa: PLC0415 - imports TensorFlow, which the command line does not need

    return compat.default_keras()


def _mlp() -> Any:
    keras = _keras()
    layers = keras.layers
    return keras.Sequential([keras.Input((784,)), layers.Dense(1024, activation="relu"),
                             layers.Dense(1024, activation="relu"), layers.Dense(10)])


def _transformer() -> Any:
    # Four blocks of width 256, 4 heads and feed-forward width 1024, on 64 positions, with 3952 output classes.
    keras = _keras()
    layers = keras.layers
    inputs = values = keras.Input((64, 256))
    for _ in range(4):
        normal = layers.LayerNormalization()(values)
        values = values + layers.MultiHeadAttention(4, 64)(normal, normal)
        normal = layers.LayerNormalization()(values)
        values = values + layers.Dense(256)(layers.Dense(1024, activation="gelu")(normal))
    return keras.Model(inputs, layers.Dense(3952)(values))


def _resnet50() -> Any:
    keras = _keras()
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)


MODELS = {model.name: model for model in (
    ModelSpec("mlp", _mlp, (784,), (), 10, 64),
    ModelSpec("transformer", _transformer, (64, 256), (64,), 3952, 16),
    ModelSpec("resnet50", _resnet50, (64, 64, 3), (), 10, 4),
)}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of Keras.

    Attributes:
        rate: Learning rate.
        options: Other arguments.
    """

    cls: str
    rate: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Build the optimizer."""
        return getattr(_keras().optimizers, self.cls)(self.rate, **self.options)

    @property
    def is_linear(self) -> bool:
        """Return whether updates are proportional to gradients, so that rounding errors are not amplified."""
        return self.cls == "SGD"


OPTIMIZERS = {
    "sgd": Optimizer("SGD", 0.01), "momentum": Optimizer("SGD", 0.01, {"momentum": 0.9}),
    "adam": Optimizer("Adam", 0.001), "adamw": Optimizer("AdamW", 0.001), "adamax": Optimizer("Adamax", 0.001),
    "nadam": Optimizer("Nadam", 0.001), "rmsprop": Optimizer("RMSprop", 0.001),
    "adagrad": Optimizer("Adagrad", 0.001), "adadelta": Optimizer("Adadelta", 0.001),
    "adafactor": Optimizer("Adafactor", 0.001), "ftrl": Optimizer("Ftrl", 0.001), "lion": Optimizer("Lion", 0.0001),
}
