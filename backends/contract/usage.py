"""Clauses on threads, large tensors and training, and on `abort()`.

A collective that no other rank calls must fail when the engine is aborted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.contract.clauses import combined
from hvkeras.backends.contract.ranks import ContractRanks, check, tensor
from hvkeras.backends.interface import Reduction
from hvkeras.job.session import current_session


def threads(ranks: ContractRanks) -> None:
    """Check two threads with different keys."""
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


def large(ranks: ContractRanks) -> None:
    """Check a tensor that exceeds internal buffers."""
    def reduce(key: str, mine: Any) -> Any:
        return ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0]

    mine = np.arange(2**21, dtype=np.float32) % 1000 + ranks.rank
    expected = sum((np.arange(2**21, dtype=np.float32) % 1000 + rank for rank in ranks.all), np.float32(0))
    for way, found in ranks.both(reduce, tf.constant(mine)):
        if not np.array_equal(found.numpy(), expected):
            raise AssertionError(f"a large sum must be right {way}. Received: {found.numpy()[:5]}...")


def trains(ranks: ContractRanks) -> None:
    """Check `fit` with a `DistributedOptimizer`."""
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
        raise AssertionError(f"the weights must equal those of one process, {weights.ravel()}. Received:"
                             f" {found.ravel()}.")


CLAUSES: dict[str, Callable[[ContractRanks], None]] = {
    "several threads may call eager collectives, and repeat their keys": threads,
    "tensors of 8 MiB are reduced correctly": large,
    "DistributedOptimizer trains like one process with all data": trains,
}


EAGER = "abort() fails an eager collective in flight, with an error that is_peer_failure() recognizes"
GRAPH = "abort() fails a function's collective in flight, with an error that is_peer_failure() recognizes"
REASON = "rank 9 has failed (simulated by the contract)"
_BEFORE, _WITHIN = 1.0, 20.0  # seconds until the abort, and until the collective must have failed


def abort_eagerly(ranks: ContractRanks) -> None:
    """Check an abort while this rank waits in an eager collective."""
    key = f"contract-only-{ranks.rank}"
    _aborted(ranks, lambda: ranks.backend.allreduce([tf.ones([3])], key, Reduction.SUM, ranks.all))


def abort_in_a_function(ranks: ContractRanks) -> None:
    """Check an abort while this rank waits in a function."""
    key = f"contract-only-{ranks.rank}"
    _aborted(ranks, tf.function(lambda: ranks.backend.allreduce([tf.ones([3])], key, Reduction.SUM, ranks.all)[0],
                                autograph=False))


def _aborted(ranks: ContractRanks, collective: Any) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            collective()
        except BaseException as error:  # noqa: BLE001 - whatever the engine raises
            errors.append(error)

    control = current_session().control
    assert control is not None
    control.gather("contract abort", None, _WITHIN)
    waiting = threading.Thread(target=wait, name="hvkeras-contract", daemon=True)
    waiting.start()
    waiting.join(_BEFORE)
    if not waiting.is_alive() and not errors:
        raise AssertionError("a collective must wait for the other ranks. Received: a result.")
    began = time.monotonic()
    ranks.backend.abort(REASON)  # another rank's abort may have failed the collective already
    took = time.monotonic() - began
    if took > _BEFORE:
        raise AssertionError(f"abort() must return within {_BEFORE:g} s. Received: {took:.1f} s.")
    waiting.join(_WITHIN)
    if waiting.is_alive():
        raise AssertionError(f"the collective must fail within {_WITHIN:g} s after abort()")
    if not errors:
        raise AssertionError("the collective must fail after abort(). Received: a result.")
    text = f"{type(errors[0]).__name__}: {errors[0]}"
    if not ranks.backend.is_peer_failure(errors[0]):
        raise AssertionError(f"is_peer_failure() must recognize the error. Received: {text}")
