"""Rank 1 is late for calls that all ranks must make, so that rank 0 seems to make them alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd

keras: Any = tf.keras
LATE = 2.5  # seconds
x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


class Evaluate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        late()
        self.model.evaluate(x, y, verbose=0)


def late() -> None:
    hvd.barrier()  # so that rank 0 is not late on a busy machine
    if hvd.rank() == 1:
        time.sleep(LATE)


def main() -> None:
    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    late()
    model.evaluate(x, y, verbose=0)
    late()
    model.fit(x, y, verbose=0, callbacks=[Evaluate()], validation_data=(x, y))
    late()
    hvd.predict(model, x)
    hvd.shutdown()


main()
