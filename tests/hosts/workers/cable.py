"""Train a model of 16 MB for `CABLE_STEPS` steps."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

import hvkeras as hvd

hvd.init("native")
model = keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024) for _ in range(4))])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3))
optimizer.build(model.trainable_variables)
batch = tf.random.stateless_normal((8, 1024), (hvd.rank(), 1))


@tf.function
def step() -> None:
    """Run one step."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(batch) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


for _ in range(int(os.environ.get("CABLE_STEPS", "20"))):
    step()
hvd.shutdown()
