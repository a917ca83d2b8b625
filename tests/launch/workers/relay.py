"""Train with backups, each time with other workers: `relay.py <how> <folder> <epoch> <step> [rank]`.

`how` is "ranks", "workers", "devices" (two in one process) or "plain". The process, or only that rank, is killed before
this step. Without an epoch, it trains to the end, and prints the difference of the weights from an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.callbacks import BackupAndRestore

HOW, BACKUP = sys.argv[1], Path(sys.argv[2])
END = (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 3 else None
VICTIM = int(sys.argv[5]) if len(sys.argv) > 5 else None
if HOW == "ranks":
    hvd.init()
STRATEGY = None
if HOW == "workers":
    STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
elif HOW == "devices":
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                               [tf.config.LogicalDeviceConfiguration()] * 2)
    STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = (X @ [[1.0], [2], [-1], [0.5]]).astype("float32")


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == END and (VICTIM is None or hvd.rank() == VICTIM):
            os.kill(os.getpid(), signal.SIGKILL)


def trained(callbacks: Any) -> Any:
    keras.utils.set_random_seed(7)
    with contextlib.nullcontext() if STRATEGY is None else STRATEGY.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        adam = keras.optimizers.Adam(0.02)
        model.compile(hvd.DistributedOptimizer(adam) if HOW == "ranks" else adam, "mse")
    if HOW == "ranks":
        x, y = hvd.shard((X, Y))
        model.fit(x, y, batch_size=24 // hvd.size(), epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    else:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
        model.fit(data, epochs=3, verbose=0, shuffle=None, callbacks=callbacks)
    return model.get_weights()


@check
def how_far_apart() -> Any:
    keras.models.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]).load_weights(
        BACKUP / "latest.weights.h5")  # Keras can read the file of a killed run
    begun = trained([BackupAndRestore(BACKUP, save_freq=1), Kill()])
    return max(float(np.abs(one - other).max()) for one, other in zip(begun, trained(None), strict=True))


if __name__ == "__main__":
    if END is None:
        run_checks()
    else:
        trained([BackupAndRestore(BACKUP, save_freq=1), Kill()])
