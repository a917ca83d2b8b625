"""Train asynchronously, with the variables on parameter servers.

Start it once for each task of a cluster, with that task's TF_CONFIG, in any order:

    cluster='{"chief": ["localhost:2345"], "worker": ["localhost:2346", "localhost:2347"], "ps": ["localhost:2348"]}'
    for task in '"worker", "index": 0' '"worker", "index": 1' '"ps", "index": 0' '"chief", "index": 0'; do
        TF_CONFIG='{"cluster": '$cluster', "task": {"type": '$task'}}' python examples/parameter_server.py &
    done
    wait
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

options = argparse.ArgumentParser(description="Train a small convolutional network with parameter servers.")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images per worker and step (default: 32)")
options.add_argument("--checkpoint-dir", type=Path, help="folder for a checkpoint after each epoch, to resume from")
args = options.parse_args()

keras.utils.set_random_seed(1)
x_train, y_train, x_test, y_test = data.digits()


def build_model() -> Any:
    """Return the compiled model. hvkeras calls this in the strategy's scope, which places variables on the servers."""
    model = convolutional_network(x_train.shape[1:])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def batches(x: Any, y: Any, context: Any) -> Any:
    """Return the dataset of one worker: its shard of the images, in batches."""
    shard = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    return shard.shuffle(len(x)).batch(args.batch_size)


# Every task makes this call. The chief trains, workers and servers serve it, and an evaluator evaluates checkpoints.
history = hvd.parameter_server.train(
    build_model, lambda context: batches(x_train, y_train, context), epochs=args.epochs,
    validation_data=lambda context: batches(x_test, y_test, context), checkpoint_dir=args.checkpoint_dir,
)

# The call returns only on the chief. `history.model` is an ordinary Keras model.
_, accuracy = history.model.evaluate(x_test, y_test, verbose=0)
print(f"test accuracy: {accuracy:.4f}", flush=True)
