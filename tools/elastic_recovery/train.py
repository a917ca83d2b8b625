"""Script of the jobs in `tools/elastic_recovery`. It uses Horovod's API; hvkeras runs it with `--as-horovod`.

Arguments: the folder of the job, and the event for a rank in its second epoch: `nothing`, `raises` or `killed`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

EPOCHS, BATCHES = 3, 100

folder, event = Path(sys.argv[1]), sys.argv[2]
hvd.init()
random = np.random.default_rng(0)
x = random.standard_normal((64 * BATCHES, 64)).astype("float32")
y = random.integers(0, 10, len(x))
model = tf.keras.Sequential([tf.keras.layers.InputLayer((64,)), tf.keras.layers.Dense(256, activation="relu"),
                             tf.keras.layers.Dense(10)])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)),
              tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x[:64], y[:64], verbose=0)  # builds the optimizer
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


class Event(tf.keras.callbacks.Callback):
    """Callback that fails one rank once, and delays steps so that an epoch takes a second."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Sleep, and fail rank 1 in the middle of the second epoch."""
        time.sleep(0.01)
        if event == "nothing" or batch != BATCHES // 2 or state.epoch != 1 or hvd.rank() != 1:
            return
        try:
            (folder / "happened").mkdir()
        except FileExistsError:
            return
        if event == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("deliberate failure")


@hvd.elastic.run
def train(state: Any) -> None:
    """Train the remaining epochs."""
    model.fit(x, y, batch_size=64, epochs=EPOCHS - state.epoch, steps_per_epoch=BATCHES - state.batch, verbose=0,
              callbacks=[Event(), hvd.elastic.UpdateBatchStateCallback(state),
                         hvd.elastic.UpdateEpochStateCallback(state),
                         hvd.elastic.CommitStateCallback(state, batches_per_commit=10)])


train(state)
print(f"trained {state.epoch} epochs on {hvd.size()} ranks", flush=True)
