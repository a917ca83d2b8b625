"""Train; all ranks hang for a while in a callback, then in validation, and then forever in their data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

hvd.init()
PAUSE = 2.5  # seconds; longer than the stall warning, shorter than the stall shutdown
passes, validations = itertools.count(), itertools.count()
BATCH = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def load() -> Iterator[Any]:
    number = next(passes)
    for batch in range(5):
        if number >= 2 and batch == 3:
            time.sleep(300)
        yield BATCH


def load_validation() -> Iterator[Any]:
    number = next(validations)
    for batch in range(3):
        if number == 1 and batch == 1:
            time.sleep(PAUSE)
        yield BATCH


def dataset(function: Any, batches: int) -> Any:
    made = tf.data.Dataset.from_generator(function, output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1))))
    return made.apply(tf.data.experimental.assert_cardinality(batches))


class Pauses(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            time.sleep(PAUSE)


model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
model.fit(dataset(load, 5), validation_data=dataset(load_validation, 3), epochs=9, shuffle=False, verbose=0,
          callbacks=[Pauses()])
