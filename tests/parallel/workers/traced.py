"""Two ranks train with HVKERAS_TRACE_STEPS: with `fit`, or in an endless custom loop."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd

keras: Any = tf.keras
how = sys.argv[1]
hvd.init()
keras.utils.set_random_seed(1)
X = np.random.default_rng(hvd.rank()).normal(size=(80, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)


@tf.function
def step(x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


if how == "fit":
    model.compile(hvd.DistributedOptimizer(optimizer), "mse", steps_per_execution=2)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
else:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    for batch in data.repeat():
        step(*batch)
        time.sleep(0.02)
hvd.shutdown()
