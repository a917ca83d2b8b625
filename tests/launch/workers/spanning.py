"""Train under the strategy that `hvd.strategy` builds; with an argument, rank 1 then misbehaves."""

from __future__ import annotations

import os
import signal
import sys
import time

import hvkeras as hvd

how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "after init":
    hvd.init()
strategy = hvd.strategy("multi_worker_mirrored")

import keras  # noqa: E402 - nothing uses TensorFlow before the strategy
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(24)
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    total = keras.metrics.Sum()
loss = model.fit(data, epochs=1, verbose=0, shuffle=None).history["loss"][0]
gathered = hvd.allgather_object(hvd.rank())
print(f"{strategy.num_replicas_in_sync} replicas, {gathered}, loss {loss:.5f}", flush=True)
if hvd.rank() == 1:
    if how == "raise":
        raise ValueError("the sky is falling")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(300)
if how == "late":
    model.fit(data, verbose=0, callbacks=[keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(300) if hvd.rank() == 1 and batch == 2 else None)])
elif how not in ("", "after init"):
    total.result()
hvd.shutdown()
