"""Training with gradients in 8 bits between hosts, in every way that gradients are reduced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

hvd.init("native")
STEPS = 25
EXACT, INT8 = hvd.Compression.none, hvd.Compression.int8
# The first and the last rank, which are on different hosts.
ends = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.global_process_set
samples = np.random.default_rng(hvd.rank()).standard_normal((64, 96)).astype(np.float32)
labels = np.tanh(samples @ np.random.default_rng(9).standard_normal((96, 8)).astype(np.float32))


def model() -> Any:
    """Return a model, of which two kernels are compressed and the last one is too small."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential([keras.Input((96,)), layers.Dense(128, "tanh"), layers.Dense(64, "tanh"), layers.Dense(8)])


def by_fit(compression: Any, jit: bool = False, **options: Any) -> list[Any]:
    """Train with `fit`."""
    net = model()
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, 0.9), compression=compression, **options), "mse",
                jit_compile=jit)
    net.fit(samples, labels, batch_size=64, epochs=STEPS, verbose=0, shuffle=False)
    return net.get_weights()


def by_tape(compression: Any, eager: bool = False, **options: Any) -> list[Any]:
    """Train in a loop, whose tape reduces the gradients."""
    net, optimizer = model(), keras.optimizers.SGD(0.1, 0.9)
    optimizer.build(net.trainable_variables)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(samples) - labels) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)

    run = step if eager else tf.function(step)
    for _ in range(STEPS):
        run()
    return net.get_weights()


def in_half_precision(compression: Any) -> list[Any]:
    """Train with float16, and a loss that is scaled."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return by_fit(compression)
    finally:
        keras.mixed_precision.set_global_policy("float32")


ways: dict[str, Callable[[Any], list[Any]]] = {
    "fit": by_fit,
    "fit, compiled by XLA": lambda compression: by_fit(compression, jit=True),
    "compiled update": lambda compression: by_fit(compression, compile_update=True),
    "accumulation": lambda compression: by_fit(compression, backward_passes_per_step=5),
    "a sum, predivided": lambda compression: by_fit(compression, gradient_predivide_factor=2.0),
    "float16": in_half_precision,
    "a tape": by_tape,
    "a tape, eagerly": lambda compression: by_tape(compression, eager=True),
}
if ends.included():
    ways["a process set"] = lambda compression: by_tape(compression, process_set=ends)
begun = model().get_weights()
for way, train in ways.items():
    weights, exact = train(INT8), train(EXACT)
    among = ends if way == "a process set" else hvd.global_process_set
    everywhere = hvd.allgather_object(weights, process_set=among)
    if not all(np.array_equal(one, other) for other in everywhere for one, other in zip(weights, other, strict=True)):
        sys.exit(f"{way}: the ranks' weights differ")
    for index, (one, other, start) in enumerate(zip(weights, exact, begun, strict=True)):
        difference = np.abs(one - other).max() / np.abs(other - start).max()
        if difference > 0.03 or (index == 0 and difference == 0):
            sys.exit(f"{way}: weight {index} is off by {difference:.2g} of its way")
    if hvd.rank() == 0:
        print(way, flush=True)
if hvd.rank() == 0:
    print("all", flush=True)
hvd.shutdown()
