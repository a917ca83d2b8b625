"""Train on the nodes of a Ray cluster: the driver starts the ranks, and receives their results.

pip install '.[cpu,ray]'   # in a clone of the repository
python examples/ray_train.py --workers 2                                  # on a local cluster
ray job submit --working-dir examples -- python ray_train.py --workers 8  # on a running cluster
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

import hvkeras as hvd
from hvkeras.ray import RayExecutor, ray_logger


def train(epochs: int, batch_size: int) -> dict[str, Any]:
    """Train on one rank. Ray runs this function on every rank."""
    import keras

    import data
    from network import convolutional_network

    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())
    x_train, y_train, x_test, y_test = data.load("digits")
    x_train, y_train = hvd.shard((x_train, y_train))
    x_test, y_test = hvd.shard((x_test, y_test), training=False)
    model = convolutional_network(x_train.shape[1:])
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        x_train, y_train, batch_size=batch_size, epochs=epochs, validation_data=(x_test, y_test), verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            # Rank 0 sends the metrics, which cover the images of all ranks, to the driver.
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ray_logger.log({"epoch": epoch, **logs})),
        ],
    )
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    return {"rank": hvd.rank(), "size": hvd.size(), "accuracy": accuracy}


def show(entry: dict[str, Any]) -> None:
    """Print the metrics from rank 0. Under Ray Tune, pass them to `tune.report` instead."""
    print(f"epoch {entry['epoch'] + 1}: loss {entry['loss']:.4f}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train on the nodes of a Ray cluster.")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--epochs", type=int, default=12)
    options.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
    options.add_argument("--use-gpu", action="store_true")
    args = options.parse_args()

    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=600), num_workers=args.workers,
                           use_gpu=args.use_gpu)
    executor.start()
    results = executor.run(train, args=[args.epochs, args.batch_size], callbacks=[show])
    executor.shutdown()
    print(f"test accuracy: {results[0]['accuracy']:.4f} on {len(results)} ranks", flush=True)
