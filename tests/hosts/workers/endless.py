"""Endless allreduces with checked results; print the progress."""

from __future__ import annotations

import os
import sys

import numpy as np
import tensorflow as tf

import hvkeras as hvd

LENGTHS = {"small": 100, "large": 500_000}
STEPS = int(os.environ.get("ENDLESS_STEPS", "0"))  # number of steps; 0 for endless

print(f"pid {os.getpid()}", flush=True)
hvd.init("native")
values = {name: tf.range(length, dtype=tf.float32) % 7 + hvd.rank() for name, length in LENGTHS.items()}
expected = {name: (np.arange(length) % 7) * hvd.size() + sum(range(hvd.size())) for name, length in LENGTHS.items()}


@tf.function
def both() -> dict[str, tf.Tensor]:
    return {name: hvd.allreduce(value, op=hvd.Sum, name=name) for name, value in values.items()}


step = 0
while not STEPS or step < STEPS:
    for name, found in both().items():
        if not np.array_equal(found.numpy(), expected[name]):
            sys.exit(f"wrong: {name} in step {step}")
    step += 1
    if step in (1, STEPS) or step % 50 == 0:
        print(f"step {step}", flush=True)
hvd.shutdown()
print("all right", flush=True)
