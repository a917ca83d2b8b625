"""Train the model of `train.py` in a custom training loop, with `hvd.DistributedGradientTape`.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/custom_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import data
import hvkeras as hvd
from network import convolutional_network

options = argparse.ArgumentParser(description="Train a small convolutional network with a custom loop.")
options.add_argument("--backend", help="collective engine: auto (default), native, tfdist, horovod or local")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images per process and step (default: 32)")
options.add_argument("--dataset", choices=data.DATASETS, default="digits")
options.add_argument("--checkpoint-dir", type=Path, help="folder for the trained model")
args = options.parse_args()

hvd.init(args.backend)

x_train, y_train, x_test, y_test = data.load(args.dataset)
keras.utils.set_random_seed(1 + hvd.rank())

# Each rank trains on its own shard of the images, shuffled differently. All shards have the same number of batches.
dataset = hvd.shard(tf.data.Dataset.from_tensor_slices((x_train, y_train)), shuffle=len(x_train))
dataset = dataset.batch(args.batch_size).prefetch(tf.data.AUTOTUNE)

model = convolutional_network(x_train.shape[1:])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
steps = args.epochs * len(dataset)
optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.001 * hvd.size(), steps))
optimizer.build(model.trainable_variables)

# All ranks start from the weights and the optimizer state of rank 0.
hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)


@tf.function
def train_step(images: Any, labels: Any) -> Any:
    """Run one step, with gradients averaged over all ranks by the tape, and return this rank's loss."""
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(args.epochs):
    losses = [train_step(images, labels) for images, labels in dataset]
    loss = hvd.allreduce(tf.reduce_mean(losses), op=hvd.Average)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}/{args.epochs}: loss {float(loss):.4f}", flush=True)

if args.checkpoint_dir and hvd.rank() == 0:
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    model.save(args.checkpoint_dir / "model.keras")

# Each rank predicts a part of the images; every rank receives all predictions, in order.
test_accuracy = (hvd.predict(model, x_test).argmax(axis=-1) == y_test).mean()
if hvd.rank() == 0:
    print(f"test accuracy: {test_accuracy:.4f}", flush=True)

hvd.shutdown()
