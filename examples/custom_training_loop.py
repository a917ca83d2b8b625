"""TensorFlow's own custom training loop on several workers: `tf.distribute` reduces, and hvkeras finds the workers.

Start it with whichever launcher you have:

    hvkeras run -np 2 python examples/custom_training_loop.py
    mpirun -np 2 python examples/custom_training_loop.py
    python examples/custom_training_loop.py                    # one process, or as many as TF_CONFIG says
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import data
import hvkeras as hvd
from network import convolutional_network

options = argparse.ArgumentParser(description="Train a small convolutional network with strategy.run.")
options.add_argument("--epochs", type=int, default=8)
options.add_argument("--batch-size", type=int, default=32, help="images in a step of one replica (default: 32)")
options.add_argument("--dataset", choices=data.DATASETS, default="fashion_mnist")
options.add_argument("--checkpoint-dir", type=Path, help="shared by all workers; training goes on from what is there")
args = options.parse_args()

# 1. The strategy, before TensorFlow is used for anything else. Addresses come from whatever launched the job.
strategy = hvd.strategy("multi_worker_mirrored")

# 2. Every worker makes the same batches of the whole job; the strategy deals each batch to the replicas.
x_train, y_train, x_test, y_test = data.load(args.dataset)
global_batch = args.batch_size * strategy.num_replicas_in_sync
train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=1)
train = strategy.experimental_distribute_dataset(train.batch(global_batch, drop_remainder=True))
test = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(global_batch))

# 3. What has variables is made under the strategy.
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = convolutional_network(x_train.shape[1:])
    optimizer = keras.optimizers.Adam(0.001)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy()
    test_accuracy = keras.metrics.SparseCategoricalAccuracy()
    test_loss = keras.metrics.Mean()
    epoch = tf.Variable(0)


def train_replica(images: Any, labels: Any) -> Any:
    """Makes a step with one replica's part of a batch; the optimizer sums the gradients of all replicas."""
    with tf.GradientTape() as tape:
        outputs = model(images, training=True)
        # A share of the loss of the whole batch, so that the sum over the replicas is its mean.
        loss = tf.nn.compute_average_loss(loss_of(labels, outputs), global_batch_size=global_batch)
        if model.losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, outputs)
    return loss


def test_replica(images: Any, labels: Any) -> None:
    """Measures one replica's part of a batch."""
    outputs = model(images, training=False)
    test_loss.update_state(loss_of(labels, outputs))
    test_accuracy.update_state(labels, outputs)


@tf.function
def train_step(images: Any, labels: Any) -> Any:
    """Makes a step on all replicas of all workers, and returns its loss."""
    return strategy.reduce("SUM", strategy.run(train_replica, args=(images, labels)), axis=None)


@tf.function
def test_step(images: Any, labels: Any) -> None:
    """Measures a batch on all replicas."""
    strategy.run(test_replica, args=(images, labels))


# 4. All workers save, since the strategy may have to sum what they hold; the folder of the first one stays.
chief = hvd.rank() == 0
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
folder = args.checkpoint_dir if args.checkpoint_dir and chief else Path(tempfile.mkdtemp())
manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
latest = tf.train.latest_checkpoint(str(args.checkpoint_dir)) if args.checkpoint_dir else None
if latest:
    checkpoint.restore(latest).expect_partial()
    if chief:
        print(f"resumes after epoch {int(epoch.numpy())}", flush=True)

while int(epoch.numpy()) < args.epochs:
    for metric in (train_accuracy, test_accuracy, test_loss):
        metric.reset_state()
    losses = [train_step(images, labels) for images, labels in train]
    for images, labels in test:
        test_step(images, labels)
    epoch.assign_add(1)
    if args.checkpoint_dir:
        manager.save()
    # Metrics are summed over all workers, so all of them ask.
    loss, accuracy = float(tf.reduce_mean(losses)), float(train_accuracy.result())
    tested, tested_loss = float(test_accuracy.result()), float(test_loss.result())
    if chief:
        print(f"epoch {int(epoch.numpy())}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}, test loss"
              f" {tested_loss:.4f}, test accuracy {tested:.4f}", flush=True)

tested = float(test_accuracy.result())
if chief:
    print(f"test accuracy: {tested:.4f}", flush=True)

hvd.shutdown()
