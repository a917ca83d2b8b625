"""Two ranks train for a report: rank 1 has slow data in `fit`, then rank 0 computes slowly in a custom loop.

Arguments: steps per execution of `fit`; or `killed`: rank 1 is killed during training.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.diagnostics import recorder
from hvkeras.job.session import current_session

SLOW = 0.05  # seconds
STEPS = 40
killed = sys.argv[1] == "killed"


def late(rank: int, values: Any, until: int | None = None) -> Any:
    """Return a tensor, with a delay on one rank; at batch `until`, that process is killed."""
    def hand_on(batch: Any, number: int = 0) -> Any:
        late.calls += 1
        if hvd.rank() == rank and until is not None and late.calls > until:
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.rank() == rank:
            time.sleep(SLOW)
        return batch

    return tf.ensure_shape(tf.numpy_function(hand_on, [values], values.dtype), values.shape)


late.calls = 0


def batches() -> Any:
    numbers = np.random.default_rng(hvd.rank()).normal(size=(STEPS * 8, 16)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((numbers, numbers[:, :1])).batch(8, drop_remainder=True)


def model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])


def slow_input(until: int | None = None) -> None:
    """Delay rank 1's data."""
    network = model()
    options = {} if killed else {"steps_per_execution": int(sys.argv[1])}
    network.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False, **options)
    data = batches().map(lambda x, y: (late(1, x, until), y))
    network.fit(data, verbose=0, shuffle=False, epochs=3 if killed else 1, validation_data=batches().take(2))


def slow_computing() -> None:
    """Delay rank 0's forward pass."""
    network, optimizer = model(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(late(0, x)) - y) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))

    for x, y in batches():
        step(x, y)


def main() -> None:
    if killed:
        recorder.WRITE_EVERY, recorder.WRITE_SHARE = 0.1, 1.0
        hvd.init()
        slow_input(until=STEPS * 2)
    else:
        hvd.init()
        rank = hvd.rank()
        slow_input()
        hvd.shutdown()
        # The record of the next job replaces this one.
        os.makedirs("input/records", exist_ok=True)
        shutil.copy(f"report/records/rank.{rank}.npz", "input/records")
        hvd.init()
        assert current_session().settings.report
        slow_computing()


main()
