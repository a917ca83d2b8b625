"""Train in mixed precision: float16 (or bfloat16) in layers, float32 in weights, with loss scaling.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/mixed_precision.py
    hvkeras run -np 2 python examples/mixed_precision.py --policy mixed_bfloat16

Mixed precision saves time and memory on GPUs. On a CPU, this script only shows how to use it.
"""

from __future__ import annotations

import argparse

import keras

import data
import hvkeras as hvd

options = argparse.ArgumentParser(description="Train a small convolutional network in mixed precision.")
options.add_argument("--policy", default="mixed_float16", choices=("mixed_float16", "mixed_bfloat16", "float32"))
options.add_argument("--epochs", type=int, default=6)
options.add_argument("--batch-size", type=int, default=32, help="images per process and step (default: 32)")
args = options.parse_args()

# 1. Set the policy before you build the model.
hvd.init()
keras.mixed_precision.set_global_policy(args.policy)

x_train, y_train, x_test, y_test = data.digits()
x_train, y_train = hvd.shard((x_train, y_train))
x_test, y_test = hvd.shard((x_test, y_test), training=False)

# 2. The outputs are float32, as the loss of float16 numbers would be inexact.
keras.utils.set_random_seed(1 + hvd.rank())
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(10),
    keras.layers.Activation("linear", dtype="float32"),
])

# 3. Wrap the optimizer as always. Under mixed_float16, `compile` puts it into a `LossScaleOptimizer`, and the ranks
#    average the gradients before that one decides whether to skip a step: all of them skip it, or none.
#    `hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2**10))` works as well.
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
)
model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_data=(x_test, y_test),
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=hvd.verbose())

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"{type(model.optimizer).__name__}, {model.layers[0].compute_dtype} layers")
    print(f"test accuracy: {accuracy:.4f}", flush=True)

hvd.shutdown()
