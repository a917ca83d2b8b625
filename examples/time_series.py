"""Forecast a time series from windows of its past.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/time_series.py
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

options = argparse.ArgumentParser(description="Forecast the temperature twelve hours ahead.")
options.add_argument("--epochs", type=int, default=4)
options.add_argument("--batch-size", type=int, default=32, help="windows per process and step (default: 32)")
args = options.parse_args()
PAST, AHEAD = 48, 12  # hours that the model sees, and hours from the last of them to the forecast


def weather(hours: int) -> Any:
    """Return temperature, pressure and wind of each hour, of shape `[hours, 3]`."""
    random = np.random.default_rng(seed=0)  # the same series on every rank
    hour = np.arange(hours)
    front = np.sin(hour / 61) + np.sin(hour / 23)
    temperature = 10 + 8 * np.sin(hour / 24 * 2 * np.pi) + 4 * front + random.normal(0, 0.5, hours)
    return np.stack([temperature, 1000 - 8 * front, random.gamma(2, 1, hours)], axis=1).astype("float32")


def windows(series: Any, training: bool) -> tf.data.Dataset:
    """Return this rank's windows in batches, each window with the temperature `AHEAD` hours after its end."""
    # 1. All ranks cut the same windows, one per element because of `batch_size=None`, and `hvd.shard` assigns them to
    #    the ranks. If each rank cut its own part of the hours, windows that cross the parts would be missing. Shuffle
    #    in `hvd.shard`, or pass `shuffle=True` with the same `seed` on all ranks to Keras's function.
    dataset = keras.utils.timeseries_dataset_from_array(
        series[:-AHEAD], series[PAST + AHEAD - 1:, 0], sequence_length=PAST, batch_size=None)
    shuffle = 2_000 if training else False
    return hvd.shard(dataset, training, shuffle=shuffle).batch(args.batch_size).prefetch(tf.data.AUTOTUNE)


hvd.init()
series = weather(4_000)
history, future = series[:3_200], series[3_200:]
train, test = windows(history, training=True), windows(future, training=False)

# 2. Each rank has the whole series, so that `adapt` finds the same mean and variance everywhere.
normalize = keras.layers.Normalization()
normalize.adapt(history)

keras.utils.set_random_seed(1 + hvd.rank())
model = keras.Sequential([
    keras.Input((PAST, series.shape[1])), normalize, keras.layers.LSTM(32), keras.layers.Dense(1),
    keras.layers.Rescaling(float(history[:, 0].std()), float(history[:, 0].mean())),  # degrees
])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.003 * hvd.size())), loss="mse", metrics=["mae"])
model.fit(train, validation_data=test, epochs=args.epochs, shuffle=False, verbose=hvd.verbose(),
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

# 3. The error covers the windows of all ranks. The simplest forecast is the temperature a day before.
_, error = model.evaluate(test, verbose=0)
if hvd.rank() == 0:
    naive = np.abs(future[24:, 0] - future[:-24, 0]).mean()
    print(f"mean error of the day before: {naive:.2f} degrees")
    print(f"mean error of the model: {error:.2f} degrees", flush=True)

hvd.shutdown()
