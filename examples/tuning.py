"""Search hyperparameters with Keras Tuner: rank 0 chooses each trial, and all ranks train it together.

Install it with `pip install keras-tuner tensorboard`, and start the search with any launcher, for example:

    hvkeras run -np 2 python examples/tuning.py

Start it again with the same folder, and the search continues where it stopped.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import keras_tuner

import data
import hvkeras as hvd

options = argparse.ArgumentParser(description="Search for the best network for images of digits.")
options.add_argument("--folder", default="search", help="folder of the trials (default: search)")
options.add_argument("--trials", type=int, default=5)
options.add_argument("--epochs", type=int, default=4, help="epochs of each trial (default: 4)")
args = options.parse_args()


def build(hp: Any) -> Any:
    """Return the compiled model of a trial."""
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(hp.Int("filters", 8, 32, step=8), 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(hp.Float("dropout", 0.0, 0.5)),
        keras.layers.Dense(10),
    ])
    rate = hp.Float("rate", 1e-4, 1e-2, sampling="log")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


hvd.init()
x_train, y_train, x_test, y_test = data.digits()
train, validation = hvd.shard((x_train[:1200], y_train[:1200])), (x_train[1200:], y_train[1200:])
validation, test = (hvd.shard(each, training=False) for each in (validation, (x_test, y_test)))
keras.utils.set_random_seed(1 + hvd.rank())

# 1. Any tuner: `BayesianOptimization`, `Hyperband`, your own. Without the wrapper, each rank would search by itself.
tuner = hvd.DistributedTuner(keras_tuner.RandomSearch(
    build, "val_accuracy", max_trials=args.trials, directory=args.folder, project_name="digits"))

# 2. `val_accuracy` covers the data of all ranks, so that all agree which trial is the best.
tuner.search(*train, validation_data=validation, epochs=args.epochs, verbose=0,
             callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

# 3. Every rank has the best model.
[model] = tuner.get_best_models()
_, accuracy = model.evaluate(*test, verbose=0)
if hvd.rank() == 0:
    print(f"best of {len(tuner.oracle.trials)} trials: {tuner.get_best_hyperparameters()[0].values}")
    print(f"test accuracy: {accuracy:.4f}", flush=True)

hvd.shutdown()
