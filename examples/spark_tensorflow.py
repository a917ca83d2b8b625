"""Train with `tf.distribute` on a Spark cluster: `hvkeras.spark.MirroredStrategyRunner`.

Start it with Python, or with `spark-submit` on a cluster:

    python examples/spark_tensorflow.py                                     # local Spark, two tasks
    spark-submit --master spark://host:7077 examples/spark_tensorflow.py --slots 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyspark import SparkConf
from pyspark.sql import SparkSession

import data
from hvkeras.spark import MirroredStrategyRunner


def train(images: Any, labels: Any, epochs: int, batch_size: int = 64) -> float:
    """Train under MultiWorkerMirroredStrategy, and return the training accuracy; `batch_size` is the global one."""
    import keras
    import tensorflow as tf

    from network import convolutional_network

    model = convolutional_network(images.shape[1:])
    model.compile(keras.optimizers.Adam(0.002), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=1).batch(
        batch_size, drop_remainder=True)
    return float(model.fit(dataset, epochs=epochs, verbose=2).history["accuracy"][-1])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train a small convolutional network with tf.distribute on Spark.")
    options.add_argument("--slots", type=int, default=2, help="number of tasks; with --gpu, of GPUs")
    options.add_argument("--gpu", action="store_true", help="train on the GPUs that Spark assigns to the tasks")
    options.add_argument("--epochs", type=int, default=12)
    args = options.parse_args()

    builder = SparkSession.builder.appName("hvkeras")
    if not SparkConf().contains("spark.master"):  # spark-submit sets it
        builder = builder.master(f"local[{args.slots}]")
    spark = builder.getOrCreate()
    spark.sparkContext.addPyFile(str(Path(__file__).with_name("network.py")))  # copied to the tasks' hosts

    x_train, y_train, _, _ = data.digits()
    runner = MirroredStrategyRunner(num_slots=args.slots, use_gpu=args.gpu)
    accuracy = runner.run(train, images=x_train, labels=y_train, epochs=args.epochs)
    print(f"training accuracy on {runner.get_num_tasks()} tasks: {accuracy:.4f}")
    spark.stop()
