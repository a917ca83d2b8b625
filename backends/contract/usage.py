"""The clauses on how collectives are used: from threads, for large tensors, and by an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.contract.clauses import combined
from hvkeras.backends.contract.ranks import Ranks, check, tensor
from hvkeras.backends.interface import Reduction


def threads(ranks: Ranks) -> None:
    """Two threads, each with its key."""
    keys = [ranks.key("first"), ranks.key("second")]
    errors: list[Exception] = []

    def work(key: str) -> None:
        try:
            for number in range(20):
                sent = tensor(ranks.rank, "float32", [3]) + float(number)
                check(ranks.backend.allreduce([sent], key, Reduction.SUM, ranks.all)[0],
                      combined(ranks, Reduction.SUM, "float32", [3]) + number * ranks.size, f"a sum of {key}")
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    workers = [threading.Thread(target=work, args=(key,), name="hvkeras-contract", daemon=True) for key in keys]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def large(ranks: Ranks) -> None:
    """More than fits into any buffer on the way."""
    def reduce(key: str, mine: Any) -> Any:
        return ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0]

    mine = np.arange(2**21, dtype=np.float32) % 1000 + ranks.rank
    expected = sum((np.arange(2**21, dtype=np.float32) % 1000 + rank for rank in ranks.all), np.float32(0))
    for way, found in ranks.both(reduce, tf.constant(mine)):
        if not np.array_equal(found.numpy(), expected):
            raise AssertionError(f"a large sum must be right {way}. Received: {found.numpy()[:5]}...")


def trains(ranks: Ranks) -> None:
    """The way from `fit` to the engine."""
    import keras

    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(8 * ranks.size, 3)).astype(np.float32)
    labels = (inputs @ np.array([[1.0], [2.0], [-1.0]], np.float32)).astype(np.float32)
    weights = np.zeros((3, 1), np.float32)
    for _ in range(3):
        weights -= 0.1 * 2 * inputs.T @ (inputs @ weights - labels) / len(inputs)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    mine = slice(8 * ranks.rank, 8 * ranks.rank + 8)
    model.fit(inputs[mine], labels[mine], batch_size=8, epochs=3, shuffle=False, verbose=0)
    found = model.get_weights()[0]
    if not np.allclose(found, weights, rtol=1e-5, atol=1e-6):
        raise AssertionError(f"the weights must be those of one process, {weights.ravel()}. Received: {found.ravel()}.")


CLAUSES: dict[str, Callable[[Ranks], None]] = {
    "eager collectives may come from several threads, and many times with the same key": threads,
    "tensors of 8 MiB arrive whole": large,
    "DistributedOptimizer trains as one process does on all data": trains,
}
