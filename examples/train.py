"""Train a small convolutional network on several processes with Keras's `fit`.

Start it with whichever launcher you have:

    hvkeras run -np 2 python examples/train.py
    horovodrun -np 2 python examples/train.py --backend horovod
    mpirun -np 2 python examples/train.py
    python examples/train.py                    # one process, or as many as TF_CONFIG says
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
options.add_argument("--batch-size", type=int, default=32, help="images in a step of one process (default: 32)")
options.add_argument("--dataset", choices=data.DATASETS, default="digits")
options.add_argument("--checkpoint-dir", type=Path, help="where the best model is saved")
args = options.parse_args()

# 1. Find the other processes.
hvd.init(args.backend)

# 2. Each process trains and validates on its own share of the images.
x_train, y_train, x_test, y_test = data.load(args.dataset)
x_train, y_train = hvd.shard((x_train, y_train))
x_test, y_test = hvd.shard((x_test, y_test), training=False)

keras.utils.set_random_seed(1 + hvd.rank())  # each process shuffles and drops out differently
model = convolutional_network(x_train.shape[1:])

# 3. Wrap the optimizer: it averages the gradients of all processes. As they see `size` times as many images
#    in a step as one would, the learning rate grows with them.
learning_rate = 0.001 * hvd.size()
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# 4. Start all processes from the weights of the first one, and go up to that learning rate in small steps.
#    Only the first one saves.
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

# 5. What Keras measures is measured on the images of all processes, and the same everywhere.
test_loss, test_accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy: {test_accuracy:.4f}", flush=True)

hvd.shutdown()
