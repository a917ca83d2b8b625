"""Fine-tune a trained network: first a new head on the frozen base, then the whole with a lower learning rate.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/fine_tuning.py
"""

from __future__ import annotations

import argparse
from typing import Any

import keras

import data
import hvkeras as hvd

options = argparse.ArgumentParser(description="Fine-tune a network for the digits 0 to 4 to the digits 5 to 9.")
options.add_argument("--epochs", type=int, default=4, help="epochs of each phase (default: 4)")
options.add_argument("--batch-size", type=int, default=16, help="images per process and step (default: 16)")
args = options.parse_args()


def shards(low: int, high: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return this rank's training and test images of the digits from `low` to `high`."""
    x_train, y_train, x_test, y_test = data.digits()
    train, test = (low <= y_train) & (y_train <= high), (low <= y_test) & (y_test <= high)
    return (hvd.shard((x_train[train], y_train[train] - low)),
            hvd.shard((x_test[test], y_test[test] - low), training=False))


def trained(model: Any, rate: float, train: tuple[Any, Any], test: tuple[Any, Any]) -> float:
    """Compile the model with a new optimizer, train it, and return its accuracy on the test images of all ranks."""
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(rate * hvd.size())),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    # The broadcast makes new layers equal on all ranks, too.
    model.fit(*train, batch_size=args.batch_size, epochs=args.epochs, validation_data=test, verbose=hvd.verbose(),
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return float(model.evaluate(*test, verbose=0)[1])


hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())

# 1. The base. In your script, it comes from `keras.applications` or `keras.saving.load_model`, on every rank.
base = keras.Sequential([
    keras.Input((8, 8, 1)),
    *(layer for filters in (32, 64) for layer in (
        keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9), keras.layers.ReLU(), keras.layers.MaxPooling2D())),
])
trained(keras.Sequential([base, keras.layers.Flatten(), keras.layers.Dense(5)]), 0.001, *shards(0, 4))

# 2. A new head on the frozen base: ranks exchange the gradients of the head only.
digits = shards(5, 9)
base.trainable = False
model = keras.Sequential([base, keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(5)])
head_accuracy = trained(model, 0.001, *digits)

# 3. `trainable` takes effect when the model is compiled again. Batch normalization stays frozen, and thus goes on with
#    the mean and variance that it has learned.
for layer in base.layers:
    layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
accuracy = trained(model, 0.0005, *digits)
if hvd.rank() == 0:
    print(f"with a new head: {head_accuracy:.4f}")
    print(f"test accuracy: {accuracy:.4f}", flush=True)

hvd.shutdown()
