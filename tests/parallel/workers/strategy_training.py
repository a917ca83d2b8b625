"""Training for the workers of tf.distribute's strategies, with Keras's `fit` and in a custom loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, 4)).astype("float32")
Y = (X @ [[1.0], [2], [-1], [0.5]] > 0).astype("float32")
BATCH = 24


def dense(*more: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                             *more, keras.layers.Dense(1)])


def two_inputs() -> Any:
    first, second = keras.Input((4,)), keras.Input((4,))
    together = keras.layers.Concatenate()([keras.layers.Dense(3)(first), keras.layers.Dense(3)(second)])
    return keras.Model([first, second], keras.layers.Dense(1)(together))


def sgd(**more: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **more)


def with_auc() -> list[Any]:
    """Return metrics whose states are more than a sum and a count."""
    return ["accuracy", keras.metrics.AUC(from_logits=True)]


def dataset(rows: int = 96, inputs: int = 1, batch: int = BATCH) -> Any:
    x = X[:rows] if inputs == 1 else (X[:rows],) * inputs
    return tf.data.Dataset.from_tensor_slices((x, Y[:rows])).batch(batch)


def fitted(scope: Any, build: Any, optimizer: Any, data: Any, validation: Any, options: dict[str, Any],
           compiled: dict[str, Any]) -> list[Any]:
    """Return weights and history of a `fit`; with validation data, also evaluation and predictions."""
    with scope:
        keras.utils.set_random_seed(1)
        model = build()
        made = {name: value() if callable(value) else value for name, value in compiled.items()}
        model.compile(optimizer(), keras.losses.BinaryCrossentropy(from_logits=True),
                      **{"metrics": ["accuracy"], **made})
    history = model.fit(data, epochs=2, verbose=0, validation_data=validation, shuffle=None, **options).history
    found = [*model.get_weights(), *history.values()]
    return found if validation is None else [*found, model.evaluate(validation, verbose=0),
                                             model.predict(validation, verbose=0)]


def looped(strategy: Any, tape_of: Callable[[Any], Any], data: Any, optimizer: Callable[[], Any],
           start: Callable[[Any], Any] = lambda _: None, batch: int = BATCH) -> list[Any]:
    """Return results of the tutorials' custom loop: weights, the loss of each step, and the accuracy.

    Args:
        strategy: The strategy.
        tape_of: Wraps the tape.
        data: The rank's data.
        optimizer: Constructor of the optimizer.
        start: Called with all variables before the first step.
        batch: The rows of the rank's batch.
    """
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = dense()
        made = optimizer()
        made.build(model.trainable_variables)
        loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_of(y, outputs), global_batch_size=batch)
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape_of(tape).gradient(loss, model.trainable_variables)
        made.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, outputs)
        return loss

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    start(model.variables + made.variables)
    distributed = strategy.experimental_distribute_dataset(data)
    losses = [train(x, y).numpy() for _ in range(3) for x, y in distributed]
    return [*model.get_weights(), losses, accuracy.result().numpy()]


def under_policy(policy: str, train: Callable[[], float]) -> float:
    """Return the result of `train` under another dtype policy."""
    keras.config.set_dtype_policy(policy)
    try:
        return train()
    finally:
        keras.config.set_dtype_policy("float32")


def after_an_infinity(scope: Callable[[], Any], wrap: Callable[[Any], Any] = lambda optimizer: optimizer,
                      only: bool = True) -> float:
    """Return 0.0 if all skip a step with infinities in the second half of its rows, and run the later ones.

    Args:
        scope: Returns the scope of the strategy.
        wrap: Wraps the optimizer.
        only: Whether this process has infinities.
    """
    with scope():
        model = dense()
        model.set_weights([np.ones(weight.shape, "float32") / 4 for weight in model.get_weights()])
        model.compile(wrap(sgd()), keras.losses.BinaryCrossentropy(from_logits=True))
    before = model.get_weights()
    x = X[:BATCH].copy()
    x[BATCH // 2 :] = np.inf if only else 1.0
    model.fit(tf.data.Dataset.from_tensor_slices((x, Y[:BATCH])).batch(BATCH), verbose=0, shuffle=None)
    scale = float(np.asarray(model.optimizer.dynamic_scale))
    skipped = difference([*model.get_weights(), scale], [*before, 2.0**14])
    model.fit(dataset(48), verbose=0, shuffle=None)
    moved = difference(model.get_weights(), before)
    return skipped if 0.0 < moved < 1.0 else moved + 1.0


def equal_masks(strategy: Any) -> int:
    """Return the number of repeated masks of a dropout layer on two replicas in two steps."""
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=3)
        layer.build((None, 64))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def draw() -> Any:
        return strategy.gather(strategy.run(lambda: layer(tf.ones([1, 64]), training=True)), axis=0)

    drawn = np.concatenate([np.asarray(draw()), np.asarray(draw())])
    return 4 - len(np.unique(drawn, axis=0))


def difference(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference; infinity for NaN or different shapes."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        first, second = np.asarray(one), np.asarray(other)
        if first.shape != second.shape or not np.isfinite(first).all():
            return float("inf")
        largest = max(largest, float(abs(first - second).max()))
    return largest


def apart(strategy: Any, build: Any = dense, optimizer: Any = sgd, data: Any = None, validation: Any = None,
          compiled: Any = None, **options: Any) -> float:
    """Return the largest difference of training under a strategy from one process on the whole batches."""
    data = dataset() if data is None else data
    found = fitted(strategy.scope(), build, optimizer, data, validation, options, compiled or {})
    return difference(found, by_one_process(build, optimizer, data, validation, compiled, **options))


def by_one_process(build: Any, optimizer: Any, data: Any, validation: Any, compiled: Any, **options: Any) -> list[Any]:
    """Return the expected results, computed eagerly: for few steps, tracing would take longer."""
    compiled = {**(compiled or {}), "run_eagerly": True, "steps_per_execution": 1}
    return fitted(contextlib.nullcontext(), build, optimizer, data, validation, options, compiled)
