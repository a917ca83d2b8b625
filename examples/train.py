"""Train a small convolutional network on several processes with Keras's `fit`.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/train.py
    horovodrun -np 2 python examples/train.py --backend horovod
    mpirun -np 2 python examples/train.py
    python examples/train.py                    # one process, or the cluster of TF_CONFIG
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras

import data
import hvkeras as hvd
from network import convolutional_network

options = argparse.ArgumentParser(description="Train a small convolutional network on several processes.")
options.add_argument("--backend", help="collective engine: auto (default), native, tfdist, horovod or local")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images per process and step (default: 32)")
options.add_argument("--dataset", choices=data.DATASETS, default="digits")
options.add_argument("--checkpoint-dir", type=Path, help="folder for the best model")
args = options.parse_args()

# 1. Find the other processes (ranks).
hvd.init(args.backend)

# 2. Each rank trains and validates on its own shard of the images.
x_train, y_train, x_test, y_test = data.load(args.dataset)
x_train, y_train = hvd.shard((x_train, y_train))
x_test, y_test = hvd.shard((x_test, y_test), training=False)

keras.utils.set_random_seed(1 + hvd.rank())  # ranks shuffle and apply dropout differently
model = convolutional_network(x_train.shape[1:])

# 3. Wrap the optimizer, which then averages the gradients over all ranks. The global batch is `size` times as large
#    as that of one rank, so scale the learning rate by `size`.
learning_rate = 0.001 * hvd.size()
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# 4. Broadcast the initial weights of rank 0, and warm up to the scaled learning rate. Only rank 0 saves the model.
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.LearningRateWarmupCallback(learning_rate, warmup_epochs=3),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=2),
]
if args.checkpoint_dir:
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    callbacks += [hvd.callbacks.BestModelCheckpoint(monitor="val_loss", filepath=args.checkpoint_dir / "best.keras")]

model.fit(
    x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_data=(x_test, y_test),
    callbacks=callbacks, verbose=hvd.verbose(),
)

# 5. The loss and the metrics cover the images of all ranks, and are the same on every rank.
test_loss, test_accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy: {test_accuracy:.4f}", flush=True)

hvd.shutdown()
