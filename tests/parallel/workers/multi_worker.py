"""Keras 3's own training under MultiWorkerMirroredStrategy: the tutorial's code, and `import hvkeras`.

Each check trains on both workers, and by itself on the whole batches, and returns how far the results are apart.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras  # noqa: F401 - it mends Keras
from harness.checks import check, run_checks

STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 4)).astype("float32")
Y = (X @ [[1.0], [2], [-1], [0.5]] > 0).astype("float32")


def dense(*more: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                             *more, keras.layers.Dense(1)])


def two_inputs() -> Any:
    first, second = keras.Input((4,)), keras.Input((4,))
    together = keras.layers.Concatenate()([keras.layers.Dense(3)(first), keras.layers.Dense(3)(second)])
    return keras.Model([first, second], keras.layers.Dense(1)(together))


def dataset(rows: int = 96, inputs: int = 1) -> Any:
    x = X[:rows] if inputs == 1 else (X[:rows],) * inputs
    return tf.data.Dataset.from_tensor_slices((x, Y[:rows])).batch(24)


def results(scope: Any, build: Any, optimizer: Any, data: Any, validation: Any, options: dict[str, Any],
            compiled: dict[str, Any]) -> Any:
    with scope:
        keras.utils.set_random_seed(1)
        model = build()
        model.compile(optimizer(), keras.losses.BinaryCrossentropy(from_logits=True),
                      metrics=["accuracy", keras.metrics.AUC(from_logits=True)], **compiled)
    history = model.fit(data, epochs=3, verbose=0, validation_data=validation, shuffle=None, **options).history
    return [*model.get_weights(), *history.values(), model.evaluate(validation, verbose=0),
            model.predict(validation, verbose=0)]


def apart(build: Any = dense, optimizer: Any = lambda: keras.optimizers.SGD(0.1, momentum=0.9), data: Any = None,
          validation: Any = None, compiled: Any = None, **options: Any) -> float:
    """The largest difference to what one process computes on the whole batches."""
    data = dataset() if data is None else data
    validation = dataset() if validation is None else validation
    found = [results(scope, build, optimizer, data, validation, options, compiled or {})
             for scope in (STRATEGY.scope(), contextlib.nullcontext())]
    return max(float(abs(np.asarray(one) - np.asarray(other)).max()) for one, other in zip(*found, strict=True))


@check
def sgd() -> Any:
    return apart()


@check
def adam_with_class_weight() -> Any:
    return apart(optimizer=lambda: keras.optimizers.Adam(0.01), class_weight={0: 1.0, 1: 3.0})


@check
def steps_per_epoch() -> Any:
    """The first batch must not be lost to building the model."""
    return apart(data=dataset().repeat(), steps_per_epoch=3)


@check
def several_steps_an_execution() -> Any:
    """Four batches, three at a time."""
    return apart(compiled={"steps_per_execution": 3})


@check
def a_last_batch_that_is_smaller() -> Any:
    return apart(data=dataset(90), validation=dataset(90))


@check
def several_inputs() -> Any:
    return apart(two_inputs, data=dataset(inputs=2), validation=dataset(inputs=2))


@check
def batch_normalization() -> Any:
    return apart(lambda: dense(keras.layers.BatchNormalization(synchronized=True)))


@check
def a_model_without_input_shape() -> Any:
    return apart(lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)]))


if __name__ == "__main__":
    run_checks()
