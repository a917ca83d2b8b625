"""Train a tiny model with a tape for `hvkeras compare`, which only has the output; never call shutdown()."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd


def train() -> None:
    """Train in a function, so that only hvkeras holds a reference to the model at exit."""
    hvd.init()
    x = np.random.default_rng(hvd.rank()).normal(size=(37, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.01)
    own = tf.Variable(float(hvd.rank()))  # differs between ranks, as it is registered below

    @tf.function
    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows) - own) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(own)
        variables = [*model.trainable_variables, own]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients[:-1], variables[:-1], strict=True))
        return loss

    for _ in range(4):
        for rows in tf.data.Dataset.from_tensor_slices(x).batch(8):
            loss = step(rows)
    if hvd.rank() == 0:
        print(f"loss: {float(loss):.6f}, accuracy: 87.5 %", flush=True)


train()
