"""A tutorial's script without any reference to hvkeras; with an argument, worker 1 fails."""

from __future__ import annotations

import json
import os
import sys

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


@tf.function
def together(value: tf.Tensor) -> tf.Tensor:
    return strategy.reduce("SUM", strategy.run(lambda: value + 0.0), axis=None)


print(f"worker {index} has {together(tf.constant(index + 1.0)).numpy()}", flush=True)
if len(sys.argv) > 1:
    if index == 1:
        raise ValueError("the sky is falling")
    together(tf.constant(1.0))
