"""Train on a Spark cluster: `hvkeras.spark.run` starts the ranks in the tasks of a barrier stage.

Start it with Python, or with `spark-submit` on a cluster:

    python examples/spark_run.py                                            # local Spark, two ranks
    spark-submit --master spark://host:7077 examples/spark_run.py --ranks 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyspark import SparkConf
from pyspark.sql import SparkSession

import data
import hvkeras as hvd


def train(images: Any, labels: Any, held_out: tuple[Any, Any], epochs: int) -> float:
    """Train on one rank, and return the test accuracy. Imports are local, because the function runs in Spark tasks."""
    import keras

    from network import convolutional_network

    hvd.init()
    x, y = hvd.shard((images, labels))
    x_test, y_test = hvd.shard(held_out, training=False)
    keras.utils.set_random_seed(1 + hvd.rank())
    model = convolutional_network(x.shape[1:])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(x, y, batch_size=32, epochs=epochs, validation_data=(x_test, y_test), verbose=hvd.verbose(),
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return float(model.evaluate(x_test, y_test, verbose=0)[1])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train a small convolutional network on Spark.")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--epochs", type=int, default=12)
    args = options.parse_args()

    builder = SparkSession.builder.appName("hvkeras")
    if not SparkConf().contains("spark.master"):  # spark-submit sets it
        builder = builder.master(f"local[{args.ranks}]")
    spark = builder.getOrCreate()
    spark.sparkContext.addPyFile(str(Path(__file__).with_name("network.py")))  # copied to the ranks' hosts

    x_train, y_train, x_test, y_test = data.digits()
    accuracies = hvd.spark.run(train, args=(x_train, y_train, (x_test, y_test), args.epochs), num_proc=args.ranks)
    print(f"test accuracy: {accuracies[0]:.4f}")
    spark.stop()
