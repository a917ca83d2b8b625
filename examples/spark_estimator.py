"""Train on a Spark DataFrame with `hvkeras.spark.KerasEstimator`, and add a column of predictions to another.

Start it with Python, or with `spark-submit` on a cluster:

    python examples/spark_estimator.py                                      # local Spark, two ranks
    spark-submit --master spark://host:7077 examples/spark_estimator.py --ranks 4 --store /a/shared/folder
"""

from __future__ import annotations

import argparse
import tempfile

import keras
import numpy as np
from pyspark import SparkConf
from pyspark.sql import SparkSession

import data
from hvkeras.spark import KerasEstimator, Store
from network import convolutional_network

options = argparse.ArgumentParser(description="Train a small convolutional network on a DataFrame.")
options.add_argument("--ranks", type=int, default=2)
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--store", help="folder or URL that all hosts share (default: a temporary local folder)")
args = options.parse_args()

builder = SparkSession.builder.appName("hvkeras")
if not SparkConf().contains("spark.master"):  # spark-submit sets it
    builder = builder.master(f"local[{args.ranks}]")
spark = builder.getOrCreate()

# 1. A DataFrame with a column of images (lists of pixels) and a column of labels.
x_train, y_train, x_test, y_test = data.digits()
train, test = (spark.createDataFrame([(image.ravel().tolist(), int(label)) for image, label in zip(x, y, strict=True)],
                                     ["image", "label"]) for x, y in ((x_train, y_train), (x_test, y_test)))

# 2. The estimator. It reshapes the values of a column to the shape of the model's input.
with tempfile.TemporaryDirectory() as folder:
    estimator = KerasEstimator(
        num_proc=args.ranks,
        store=Store.create(args.store or folder),
        model=convolutional_network(x_train.shape[1:]),
        optimizer=keras.optimizers.Adam(0.001 * args.ranks),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        feature_cols=["image"],
        label_cols=["label"],
        validation=0.1,
        batch_size=32,
        epochs=args.epochs,
    )
    trained = estimator.fit(train)

# 3. The trained model adds a column of predictions: ten logits per image.
predicted = trained.transform(test).select("label", "label__output").collect()
correct = [int(np.argmax(row["label__output"])) == row["label"] for row in predicted]
print(f"test accuracy: {np.mean(correct):.4f}")
spark.stop()
