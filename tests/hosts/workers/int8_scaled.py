"""Rounding errors across steps that a loss scale skips, against their sums in NumPy."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.gradients.rounding_errors import rounding_errors

hvd.init("native")
SIZE, COUNTS, SCALE = hvd.size(), (9000, 5000), 1024.0
weights = [keras.Variable(np.zeros(count, np.float32), name=f"weight{count}") for count in COUNTS]
inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.int8)
optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=4)
optimizer.build(weights)
apply = tf.function(lambda *gradients: optimizer.apply(list(gradients), weights))
errors = rounding_errors()
assert errors is not None
applied = [np.zeros(count) for count in COUNTS]  # the sum of all means that should have been applied
found = []
for step in range(12):
    random = np.random.default_rng(step)
    of_ranks = [[random.standard_normal(count).astype(np.float32) for count in COUNTS] for _ in range(SIZE)]
    scale = float(optimizer.dynamic_scale.numpy())
    own = [gradient * np.float32(scale) for gradient in of_ranks[hvd.rank()]]
    skipped = step in (3, 4, 9)
    if skipped and hvd.rank() == step % SIZE:
        own[step % 2][7] = np.inf  # in one of the 56 blocks
    apply(*map(tf.constant, own))
    if not skipped:
        applied = [total + np.mean([of_ranks[rank][index] for rank in range(SIZE)], 0, np.float64)
                   for index, total in enumerate(applied)]
    # What was applied, and what the errors still add, are what the gradients of the steps were.
    left = [one / SIZE for one in errors.total(weights, hvd.global_process_set)]
    missing = [np.abs(total + weight.numpy() - one).max()
               for total, weight, one in zip(applied, weights, left, strict=True)]
    found.append({"scale": scale, "missing": float(max(missing)), "errors": float(np.abs(left[0]).max())})
print(json.dumps(found), flush=True)
hvd.shutdown()
