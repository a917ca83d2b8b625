"""Train with Keras under tf.distribute.MultiWorkerMirroredStrategy, in the steps of TensorFlow's tutorial on it.

Keras 3 only needs `import hvkeras` for this; `hvd.init()` is not called. TF_CONFIG lists the workers, and gives each
its index:

    start() {
        TF_CONFIG='{"cluster": {"worker": ["localhost:23451", "localhost:23452"]},
                    "task": {"type": "worker", "index": '$1'}}' python examples/tutorial_multi_worker.py
    }
    start 1 & start 0; wait

Without TF_CONFIG it trains in one process. After a kill, start it again with the same folder: training resumes after
the last completed epoch. Only the chief needs access to the folder.
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

options = argparse.ArgumentParser(description="Train under MultiWorkerMirroredStrategy.")
options.add_argument("--folder", type=Path, default=Path("tutorial"),
                     help="folder for the chief's output (default: tutorial)")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
options.add_argument("--tensorboard", action="store_true", help="write summaries into the folder's logs")
args = options.parse_args()


def datasets(global_batch: int) -> tuple[Any, Any, int]:
    """Return the full datasets, of which TensorFlow gives each worker a shard; all workers must shuffle identically.

    Returns:
        The training data (repeated infinitely), the test data, and the number of steps per epoch.
    """
    x_train, y_train, x_test, y_test = data.load("digits")
    train = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train = train.shuffle(len(x_train), seed=1).repeat().batch(global_batch)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(global_batch)
    return train, test, len(x_train) // global_batch


def compiled_model(workers: int) -> Any:
    """Return the compiled model. Call this in the strategy's scope."""
    model = convolutional_network((8, 8, 1))
    model.compile(
        optimizer=keras.optimizers.Adam(0.001 * workers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def is_chief(strategy: Any) -> bool:
    """Return whether this worker is the chief: that of TF_CONFIG or, in a cluster without one, worker 0."""
    resolver = strategy.cluster_resolver
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type in (None, "", "chief") or (not has_chief and resolver.task_id == 0)


# 1. Create the strategy first. It connects the workers, and must precede any other TensorFlow operation.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = is_chief(strategy)
keras.utils.set_random_seed(1)

# 2. The global batch size grows with the number of workers. Variables are mirrored on all workers.
workers = strategy.num_replicas_in_sync
train, test, steps = datasets(args.batch_size * workers)
with strategy.scope():
    model = compiled_model(workers)

# 3. After a restart, all workers restore the chief's backup. Only the chief saves.
args.folder.mkdir(parents=True, exist_ok=True)
callbacks = [
    hvd.callbacks.BackupAndRestore(args.folder / "backup"),
    hvd.callbacks.ModelCheckpoint(args.folder / "best.keras", "val_accuracy", save_best_only=True),
]
if args.tensorboard:
    callbacks += [hvd.callbacks.TensorBoard(args.folder / "logs")]

# 4. All workers call fit with the same dataset.
model.fit(train, epochs=args.epochs, steps_per_epoch=steps, validation_data=test, callbacks=callbacks,
          shuffle=False, verbose=2 if chief else 0)  # the dataset is already shuffled

# 5. The chief saves the model. All workers evaluate it together, so that none exits while the chief saves.
if chief:
    model.save(args.folder / "trained.keras")
loss, accuracy = model.evaluate(test, verbose=0)

# 6. The saved model is an ordinary Keras model: loading it requires neither the strategy nor hvkeras.
if chief:
    loaded = keras.saving.load_model(args.folder / "trained.keras")
    _, loaded_accuracy = loaded.evaluate(test, verbose=0)
    print(f"test accuracy: {accuracy:.4f}", flush=True)
    print(f"loaded again: {loaded_accuracy:.4f}", flush=True)
