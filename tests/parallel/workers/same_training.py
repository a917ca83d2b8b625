"""Trains on shards with all ranks, and on whole batches alone; reports how far the weights are apart.

Arguments: the names of the cases, and `--eager` to run every step eagerly.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

STEPS, BATCH = 5, 16
keras: Any = tf.keras
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")

CASES: dict[str, Any] = {
    "sgd_momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam_clip_decay": lambda: keras.optimizers.Adam(0.01, clipnorm=0.01, weight_decay=0.02),
    "adam_global_clip": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.02),
    "sgd_clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "adam_ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "adam_schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
}
if KERAS_3:
    CASES["adam_accumulating"] = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
PLAIN = ("Adadelta", "Adafactor", "Adagrad", "AdamW", "Adamax", "Ftrl", "Lion", "Muon", "Nadam", "RMSprop",
         "ScheduleFreeAdamW")
LEGACY = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
for _name in PLAIN:
    if hasattr(keras.optimizers, _name):
        CASES[_name] = functools.partial(getattr(keras.optimizers, _name), learning_rate=0.02)
if not KERAS_3:
    for _name in LEGACY:
        CASES[f"legacy_{_name}"] = functools.partial(getattr(keras.optimizers.legacy, _name), learning_rate=0.02)


def data() -> tuple[Any, Any]:
    """The whole batches, the same on every rank."""
    random = np.random.default_rng(1)
    rows = STEPS * BATCH
    return random.normal(size=(rows, 6)).astype("float32"), random.normal(size=(rows, 3)).astype("float32")


def model() -> Any:
    """A model with the same weights on every rank."""
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])


def trained(optimizer: Any, rank: int, size: int, eager: bool) -> list[Any]:
    """The weights after training on rows `rank`, `rank + size`, ... of each batch."""
    net = model()
    net.compile(optimizer, "mse", run_eagerly=eager)
    x, y = data()
    net.fit(x[rank::size], y[rank::size], batch_size=BATCH // size, shuffle=False, verbose=0)
    return list(net.get_weights())


def apart(weights: list[Any], others: list[Any]) -> float:
    """The largest difference, relative to the largest weight."""
    largest = max(float(np.max(np.abs(other))) for other in others)
    return max(float(np.max(np.abs(one - other))) for one, other in zip(weights, others, strict=True)) / largest


@check
def differences() -> dict[str, Any]:
    """For each case: how far from the truth, how far from the start, and a number equal on ranks with equal weights."""
    eager = "--eager" in sys.argv
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(CASES)
    start = model().get_weights()
    found = {}
    for name in names:
        if name not in CASES:
            continue
        with hvd.alone():
            alone = trained(CASES[name](), 0, 1, True) if hvd.rank() == 0 else None
        truth = hvd.broadcast_object(alone, 0)
        weights = trained(hvd.DistributedOptimizer(CASES[name]()), hvd.rank(), hvd.size(), eager)
        found[name] = [apart(weights, truth), apart(truth, start), float(np.sum([np.sum(one) for one in weights]))]
    return found


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)
