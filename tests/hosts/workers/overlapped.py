"""Training steps whose buckets are reduced beside the backward pass; the weights must be right."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

hvd.init("native")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8, 8, 3)), *(keras.layers.Conv2D(8, 3, activation="relu") for _ in range(2)),
                          keras.layers.Flatten(), *(keras.layers.Dense(64, activation="tanh") for _ in range(3)),
                          keras.layers.Dense(3)])
variables = model.trainable_variables
batches = [np.random.default_rng(rank).standard_normal((4, 8, 8, 3), np.float32) for rank in range(hvd.size())]


def gradients_of(batch: tf.Tensor) -> list[tf.Tensor]:
    """Return the gradients of a loss that is large enough to differ between batches."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(batch, training=True) ** 2)
    return tape.gradient(loss, variables)


optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
optimizer.build(variables)


@tf.function
def step(batch: tf.Tensor, fails: tf.Tensor) -> list[tf.Tensor]:
    """Apply the gradients, and return them: their memory must not be reused for the sums."""
    gradients = gradients_of(batch)
    tf.debugging.assert_equal(fails, False)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return gradients


@tf.function
def loop(batch: tf.Tensor) -> list[tf.Tensor]:
    """Return the gradients of a tape that reduces them."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(batch, training=True) ** 2)
    return hvd.DistributedGradientTape(tape).gradient(loss, variables)


for function in (step.get_concrete_function(tf.constant(batches[0]), tf.constant(False)),
                 loop.get_concrete_function(tf.constant(batches[0]))):
    operations = function.graph.get_operations()
    starts = [operation for operation in operations if operation.type == "HvkerasAllreduceStart"]
    if len(starts) < 4:
        sys.exit(f"the gradients are in {len(starts)} buckets")
    if not all(any(start in one.control_inputs for one in operations) for start in starts[:-1]):
        sys.exit("the backward pass does not wait for all buckets to be started")
reduced = loop(tf.constant(batches[hvd.rank()]))
for index, gradient in enumerate(reduced):
    mean = sum(gradients_of(tf.constant(batch))[index].numpy() for batch in batches) / hvd.size()
    if not np.allclose(gradient.numpy(), mean, 1e-4, 1e-6):
        sys.exit(f"the tape's gradient of {variables[index].path} is wrong")
for number in range(6):
    start = [np.array(variable) for variable in variables]
    parts = [gradients_of(tf.constant(batch)) for batch in batches]
    if number == 3:
        try:
            step(tf.constant(batches[hvd.rank()]), tf.constant(True))
            sys.exit("nothing failed")
        except tf.errors.InvalidArgumentError:
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
    own = step(tf.constant(batches[hvd.rank()]), tf.constant(False))
    for index, variable in enumerate(variables):
        expected = start[index] - 0.1 * sum(part[index].numpy() for part in parts) / hvd.size()
        if not np.allclose(np.array(variable), expected, 1e-4, 1e-6):
            sys.exit(f"wrong weights in step {number}: {variable.path}, {np.abs(np.array(variable) - expected).max()}")
        if not np.allclose(own[index].numpy(), parts[hvd.rank()][index].numpy(), 1e-4, 1e-6):
            sys.exit(f"the own gradient of {variable.path} has changed in step {number}")
hvd.shutdown()
