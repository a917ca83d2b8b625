"""Final losses with exact gradients and in 8 bits, for several seeds, and the way that weights go without feedback."""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvkeras as hvd
from hvkeras.gradients.rounding_errors import rounding_errors

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import data

hvd.init("native")
SEEDS = 5
EXACT, INT8 = hvd.Compression.none, hvd.Compression.int8
layers = keras.layers
Data = tuple[Any, Any, Any, Any]


class Forgetful(keras.callbacks.Callback):
    """Switches the error feedback off."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.forget(self.model)

    @staticmethod
    def forget(model: Any) -> None:
        """Set the rounding errors of a model's gradients to zero."""
        variables, errors = model.trainable_variables, rounding_errors()
        assert errors is not None
        errors.restore(variables, [None if one is None else np.zeros_like(one) for one in errors.of(variables)])


def classifier() -> Any:
    """Return a convolutional network for images of digits."""
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPool2D(), layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)])


LENGTH, CHARACTERS = 32, sorted(set("".join(pydoc_data.topics.topics.values())))


def language_model() -> Any:
    """Return a small transformer that predicts the next character."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    values = layers.Embedding(len(CHARACTERS), 64)(inputs) + layers.Embedding(LENGTH, 64)(
        keras.ops.arange(LENGTH)[None])
    for _ in range(2):
        normal = layers.LayerNormalization()(values)
        values = values + layers.MultiHeadAttention(4, 16)(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(values)
        values = values + layers.Dense(64)(layers.Dense(256, activation="gelu")(normal))
    return keras.Model(inputs, layers.Dense(len(CHARACTERS))(layers.LayerNormalization()(values)))


def text() -> Data:
    """Return lines of Python's documentation."""
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    topics = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    rows = np.array([numbers[character] for character in topics[: 5000 * (LENGTH + 1)]]).reshape(-1, LENGTH + 1)
    rows = np.random.default_rng(0).permutation(rows)
    return rows[:4000, :-1], rows[:4000, 1:], rows[4000:, :-1], rows[4000:, 1:]


def losses_of(build: Callable[[], Any], optimizer: Any, samples: Data, epochs: int, compression: Any) -> list[float]:
    """Train on this rank's share of the samples with each seed, and return the losses of validation."""
    model, found = build(), []
    model.compile(hvd.DistributedOptimizer(optimizer, compression=compression),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    start = [np.array(variable) for variable in model.optimizer.variables]
    x, y, x_test, y_test = samples
    for seed in range(SEEDS):  # with the functions that the first one has traced
        keras.utils.set_random_seed(seed)
        model.set_weights(build().get_weights())
        for variable, value in zip(model.optimizer.variables, start, strict=True):
            variable.assign(value)
        Forgetful.forget(model)
        model.fit(x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()], batch_size=32, epochs=epochs, verbose=0,
                  shuffle=False)
        found.append(float(model.evaluate(x_test, y_test, batch_size=250, verbose=0)))
    return found


def weights_of(compression: Any, callbacks: Sequence[Any] = ()) -> list[Any]:
    """Return the weights of a regular problem before and after 100 steps, in which no difference grows by itself."""
    random = np.random.default_rng(hvd.rank())
    x = random.standard_normal((64, 96)).astype(np.float32)
    y = np.tanh(x @ np.random.default_rng(9).standard_normal((96, 8)).astype(np.float32))
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((96,)), layers.Dense(128, "tanh"), layers.Dense(64, "tanh"), layers.Dense(8)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), compression=compression), "mse")
    begun = model.get_weights()[0]
    model.fit(x, y, batch_size=64, epochs=100, verbose=0, callbacks=callbacks)
    return [begun, model.get_weights()[0]]


begun, exact = weights_of(EXACT)
way = np.sqrt(np.mean((exact - begun) ** 2))
found: dict[str, Any] = {
    name: float(np.sqrt(np.mean((weights_of(INT8, callbacks)[1] - exact) ** 2)) / way)
    for name, callbacks in (("with feedback", ()), ("without feedback", (Forgetful(),)))}
for name, build, optimizer, samples, epochs in (
        ("digits", classifier, lambda: keras.optimizers.SGD(0.05, 0.9), data.digits(), 4),
        ("text", language_model, lambda: keras.optimizers.Adam(2e-3), text(), 1)):
    found[name] = [losses_of(build, optimizer(), samples, epochs, compression) for compression in (EXACT, INT8)]
if hvd.rank() == 0:
    print(json.dumps(found), flush=True)
hvd.shutdown()
