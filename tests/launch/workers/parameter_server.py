"""Train with parameter servers, long enough for failures; the second argument is a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvkeras import parameter_server

X = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
Y = (X @ [[1.0], [2], [-1], [0.5]]).astype("float32")


def build_model() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return model


def dataset_fn(context: Any) -> Any:
    part = tf.data.Dataset.from_tensor_slices((X, Y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    return part.shuffle(640).batch(32)


def tell(epoch: int, logs: Any) -> None:
    sys.stdout.write(f"epoch {epoch + 1} loss {logs['loss']:.5f}\n")


epochs, folder = int(sys.argv[1]), Path(sys.argv[2])
parameter_server.train(
    build_model, dataset_fn, epochs=epochs, verbose=0, validation_data=dataset_fn, log_dir=folder / "logs",
    checkpoint_dir=folder / "checkpoints", callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=tell)])
