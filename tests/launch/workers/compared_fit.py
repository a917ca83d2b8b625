"""Train a tiny model with `fit` for `hvkeras compare`, and print the script's own view of the training."""

from __future__ import annotations

import json

import keras
import numpy as np

import hvkeras as hvd

hvd.init()
numbers = np.random.default_rng(0)
x = numbers.normal(size=(148, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int64")
x, y = x[hvd.rank() :: 4], y[hvd.rank() :: 4]  # 37 rows on each rank, also on one process

keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compile_update=True),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
loss, accuracy = model.evaluate(x, y, batch_size=8, verbose=0)
if hvd.rank() == 0:
    print("accuracy 0.1234: a number that must not win over that of evaluate()")
    print("known", json.dumps({"loss": loss, "accuracy": accuracy}), flush=True)
