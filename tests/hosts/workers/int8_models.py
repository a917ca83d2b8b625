"""The rounding errors of gradients in 8 bits belong to one model, and end with its optimizer."""

from __future__ import annotations

import gc
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.gradients.rounding_errors import rounding_errors

hvd.init("native")
INT8 = hvd.Compression.int8
samples = np.random.default_rng(hvd.rank()).standard_normal((64, 96)).astype(np.float32)
leads_its_host = hvd.local_rank() == 0
errors = rounding_errors()
assert errors is not None
seen: dict[str, Any] = {}  # every bucket of this job, by its key


def require(holds: bool, what: str) -> None:
    """Exit unless a condition holds."""
    if not holds:
        sys.exit(what)


def model(width: int = 128, optimizer: str = "SGD") -> Any:
    """Return a compiled model, always with the same weights."""
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((96,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(8)])
    net.compile(hvd.DistributedOptimizer(getattr(keras.optimizers, optimizer)(0.01), compression=INT8), "mse")
    return net


def train(net: Any, epochs: int = 3) -> list[Any]:
    """Train, one step per epoch, and return the weights."""
    net.fit(samples, samples[:, :8], batch_size=64, epochs=epochs, verbose=0, shuffle=False)
    seen.update(errors._buckets)
    return list(net.get_weights())


def kept() -> list[int]:
    """Return the sizes of all arrays of errors that the engine keeps on this rank."""
    gc.collect()
    arrays = [errors._backend.rounding_errors(key, one.ranks, one.starts[-1]) for key, one in seen.items()]
    return [array.size for array in arrays if array is not None]


def by_tape(width: int) -> None:
    """Train a model with a tape, in a function and eagerly."""
    net = keras.Sequential([keras.Input((96,)), keras.layers.Dense(width, use_bias=False)])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(samples) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=INT8)
        net.weights[0].assign_sub(tape.gradient(loss, net.trainable_variables)[0])

    for run in (tf.function(step), step, step):
        run()
    seen.update(errors._buckets)


# Models of a tuner: each has its own number of weights.
for width in range(128, 176, 16):
    train(model(width))
    by_tape(width)
require(kept() == [], f"errors of models that are gone: {kept()}")
require(errors._buckets == {}, f"buckets of models that are gone: {errors._buckets}")

# An optimizer that is replaced takes its errors along; the model continues without them.
net = model()
train(net)
require(kept() == [96 * 128] * leads_its_host, f"errors of a model: {kept()}")
net.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=INT8), "mse")
train(net)
require(kept() == [96 * 128] * leads_its_host, f"errors of a model with a new optimizer: {kept()}")
# One with the same plan takes them over, and keeps them when the first one ends.
net.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=INT8), "mse")
train(net)
require(kept() == [96 * 128] * leads_its_host, f"errors of a model with an equal optimizer: {kept()}")
del net

# Equal models do not share errors: neither with one that is gone, nor with one that is trained in turn.
alone = train(model())
again = train(model())
require(all(map(np.array_equal, alone, again)), "an equal model begins with the errors of one that is gone")
first, second = model(), model()
for _ in range(3):
    train(first, 1)
    train(second, 1)
for net in (first, second):
    require(all(map(np.array_equal, alone, net.get_weights())), "models that are trained in turn share errors")

# shutdown() frees all errors, and optimizers that end after it do no harm.
gc.collect()
backend, buckets = errors._backend, dict(errors._buckets)
require(len(buckets) == 2, f"buckets of two models: {buckets}")
hvd.shutdown()
left = [backend.rounding_errors(key, one.ranks, one.starts[-1]) for key, one in buckets.items()]
require(not any(one is not None for one in left), "errors after shutdown()")
hvd.init("native")
errors = rounding_errors()
del first, second, net
gc.collect()
train(model())
require(kept() == [], "errors of the first model after another init()")
print("all", flush=True)
hvd.shutdown()
