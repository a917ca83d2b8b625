"""TensorBoard under MultiWorkerMirroredStrategy, without `hvd.init()`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()


@check
def metrics() -> Any:
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(24)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
                                  keras.layers.Dropout(0.1), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    board = hvd.callbacks.TensorBoard("logs", update_freq=1, write_steps_per_second=True, profile_batch=2,
                                      profile_rank=1)
    return model.fit(data, epochs=2, validation_data=data, verbose=0, shuffle=None, callbacks=[board]).history


if __name__ == "__main__":
    run_checks()
