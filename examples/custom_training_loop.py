"""Train with a `tf.distribute` strategy in a custom loop: hvkeras finds the workers, TensorFlow reduces the gradients.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/custom_training_loop.py
    mpirun -np 2 python examples/custom_training_loop.py
    python examples/custom_training_loop.py                    # one process, or the cluster of TF_CONFIG
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
options.add_argument("--batch-size", type=int, default=32, help="images per replica and step (default: 32)")
options.add_argument("--dataset", choices=data.DATASETS, default="fashion_mnist")
options.add_argument("--checkpoint-dir", type=Path, help="folder shared by all workers; training resumes from it")
args = options.parse_args()

# 1. Create the strategy before any other use of TensorFlow. The launcher provides the addresses of the workers.
strategy = hvd.strategy("multi_worker_mirrored")

# 2. Every worker builds the same global batches; the strategy splits each of them among the replicas.
x_train, y_train, x_test, y_test = data.load(args.dataset)
global_batch = args.batch_size * strategy.num_replicas_in_sync
train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train), seed=1)
train = strategy.experimental_distribute_dataset(train.batch(global_batch, drop_remainder=True))
test = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(global_batch))

# 3. Create everything that has variables in the scope of the strategy.
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
    """Run one step on this replica's part of a batch; the optimizer sums the gradients over all replicas."""
    with tf.GradientTape() as tape:
        outputs = model(images, training=True)
        # Divided by the global batch size, so that the sum over all replicas is the mean loss.
        loss = tf.nn.compute_average_loss(loss_of(labels, outputs), global_batch_size=global_batch)
        if model.losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, outputs)
    return loss


def test_replica(images: Any, labels: Any) -> None:
    """Update the test metrics with this replica's part of a batch."""
    outputs = model(images, training=False)
    test_loss.update_state(loss_of(labels, outputs))
    test_accuracy.update_state(labels, outputs)


@tf.function
def train_step(images: Any, labels: Any) -> Any:
    """Run one step on all replicas of all workers, and return its loss."""
    return strategy.reduce("SUM", strategy.run(train_replica, args=(images, labels)), axis=None)


@tf.function
def test_step(images: Any, labels: Any) -> None:
    """Update the test metrics on all replicas."""
    strategy.run(test_replica, args=(images, labels))


# 4. All workers must save, because saving may reduce variables over the workers. Only the chief's folder persists.
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
    # `result` reduces over all workers, so all of them must call it.
    loss, accuracy = float(tf.reduce_mean(losses)), float(train_accuracy.result())
    val_accuracy, val_loss = float(test_accuracy.result()), float(test_loss.result())
    if chief:
        print(f"epoch {int(epoch.numpy())}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}, test loss"
              f" {val_loss:.4f}, test accuracy {val_accuracy:.4f}", flush=True)

final_accuracy = float(test_accuracy.result())
if chief:
    print(f"test accuracy: {final_accuracy:.4f}", flush=True)

hvd.shutdown()
