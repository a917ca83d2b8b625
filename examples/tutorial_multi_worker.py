"""Train with Keras under tf.distribute.MultiWorkerMirroredStrategy, as TensorFlow's tutorial on it is built up.

`import hvkeras` is all that Keras 3 needs for it; `hvd.init()` is not called. TF_CONFIG tells each worker its place:

    start() {
        TF_CONFIG='{"cluster": {"worker": ["localhost:23451", "localhost:23452"]},
                    "task": {"type": "worker", "index": '$1'}}' python examples/tutorial_multi_worker.py
    }
    start 1 & start 0; wait

Without TF_CONFIG it trains in one process. A job that was killed goes on after its last whole epoch when it is started
again with the same folder, which only the chief has to see.
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
options.add_argument("--folder", type=Path, default=Path("tutorial"), help="where the chief writes (default: tutorial)")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images in a step of one worker (default: 32)")
options.add_argument("--tensorboard", action="store_true", help="write summaries into the folder's logs")
args = options.parse_args()


def datasets(global_batch: int) -> tuple[Any, Any, int]:
    """The whole data on every worker: TensorFlow deals each batch out, so all workers must shuffle alike.

    Returns:
        Training data that never end, test data, and the steps of an epoch.
    """
    x_train, y_train, x_test, y_test = data.load("digits")
    train = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train = train.shuffle(len(x_train), seed=1).repeat().batch(global_batch)
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(global_batch)
    return train, test, len(x_train) // global_batch


def compiled_model(workers: int) -> Any:
    """The model, which must be built and compiled in the strategy's scope."""
    model = convolutional_network((8, 8, 1))
    model.compile(
        optimizer=keras.optimizers.Adam(0.001 * workers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def is_chief(strategy: Any) -> bool:
    """Whether this worker writes for all: the chief of TF_CONFIG or, in a cluster without one, worker 0."""
    resolver = strategy.cluster_resolver
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type in (None, "", "chief") or (not has_chief and resolver.task_id == 0)


# 1. The strategy comes first: it connects the workers, before anything else of TensorFlow runs.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = is_chief(strategy)
keras.utils.set_random_seed(1)

# 2. A global batch is as many images for each worker. The variables live on all workers.
workers = strategy.num_replicas_in_sync
train, test, steps = datasets(args.batch_size * workers)
with strategy.scope():
    model = compiled_model(workers)

# 3. All workers go back to the chief's backup when they start again; the chief alone saves.
args.folder.mkdir(parents=True, exist_ok=True)
callbacks = [
    hvd.callbacks.BackupAndRestore(args.folder / "backup"),
    hvd.callbacks.ModelCheckpoint(args.folder / "best.keras", "val_accuracy", save_best_only=True),
]
if args.tensorboard:
    callbacks += [hvd.callbacks.TensorBoard(args.folder / "logs")]

# 4. Each worker calls fit with the same data.
model.fit(train, epochs=args.epochs, steps_per_epoch=steps, validation_data=test, callbacks=callbacks,
          shuffle=False, verbose=2 if chief else 0)  # the dataset is shuffled already

# 5. The chief saves the model. All evaluate it together, so that nobody leaves before that.
if chief:
    model.save(args.folder / "trained.keras")
loss, accuracy = model.evaluate(test, verbose=0)

# 6. What was saved is a plain model, which needs neither the strategy nor hvkeras.
if chief:
    again = keras.saving.load_model(args.folder / "trained.keras")
    found = again.evaluate(test, verbose=0)
    print(f"test accuracy: {accuracy:.4f}", flush=True)
    print(f"loaded again: {found[1]:.4f}", flush=True)
