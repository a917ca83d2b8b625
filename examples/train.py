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
from network import accuracy, convolutional_network

options = argparse.ArgumentParser(description="Train a small convolutional network on several processes.")
options.add_argument("--backend", help="collective engine: auto (default), tfdist, horovod or local")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images in a step of one process (default: 32)")
options.add_argument("--dataset", choices=data.DATASETS, default="digits")
options.add_argument("--checkpoint-dir", type=Path, help="where the model is saved after each epoch")
args = options.parse_args()

# 1. Find the other processes.
hvd.init(args.backend)

# 2. Each process trains on its own part of the images. All parts are equally long: the processes meet in every step.
x_train, y_train, x_test, y_test = data.load(args.dataset)
even = len(x_train) - len(x_train) % hvd.size()
x_train, y_train = x_train[:even][hvd.rank() :: hvd.size()], y_train[:even][hvd.rank() :: hvd.size()]

keras.utils.set_random_seed(1 + hvd.rank())  # each process shuffles and drops out differently
model = convolutional_network(x_train.shape[1:])

# 3. Wrap the optimizer: it averages the gradients of all processes. As they see `size` times as many images
#    in a step as one would, the learning rate grows with them.
steps = args.epochs * -(-len(x_train) // args.batch_size)
learning_rate = keras.optimizers.schedules.CosineDecay(0.001 * hvd.size(), steps)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# 4. Start all processes from the weights of the first one; only that one saves.
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if args.checkpoint_dir:
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    path = args.checkpoint_dir / "epoch-{epoch:02d}.keras"
    callbacks += hvd.rank0_callbacks([keras.callbacks.ModelCheckpoint(path)])

model.fit(
    x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks, verbose=hvd.verbose()
)

# 5. All test together, each on its own part.
test_accuracy = accuracy(model, x_test, y_test)
if hvd.rank() == 0:
    print(f"test accuracy: {test_accuracy:.4f}", flush=True)

hvd.shutdown()
