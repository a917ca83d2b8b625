"""Two ranks train with TensorBoard; rank 1 is late in each step. The test reads the files.

Arguments: `--few` for checks that depend on the backend.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.diagnostics import spans

keras: Any = tf.keras
X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
LATE = 0.25  # seconds
FEW = "--few" in sys.argv


class Late(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1:
            time.sleep(LATE)


def fitted(*callbacks: Any, model: Any = None, **compiled: Any) -> Any:
    if model is None:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", **compiled)
    x, y = X[hvd.rank()::2], Y[hvd.rank()::2]
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(x, y), callbacks=list(callbacks))
    return model


@check
def everyone() -> Any:
    """The differences of the weights from training without the callback."""
    board = hvd.callbacks.TensorBoard("everyone", profile_batch=(2, 3), profile_rank=1, update_freq=2)
    with_it, without = fitted(board, Late()), fitted()
    return max(float(abs(one - other).max()) for one, other in zip(with_it.get_weights(), without.get_weights(),
                                                                  strict=True))


@check
def the_chief_alone() -> None:
    if FEW:
        return
    fitted(*hvd.rank0_callbacks([hvd.callbacks.TensorBoard("the_chief_alone")]))


@check
def again() -> bool:
    """Another fit with a new callback; return whether the step was not retraced."""
    if FEW:
        return True
    model = fitted(hvd.callbacks.TensorBoard("again/first"))
    function = model.train_function
    fitted(hvd.callbacks.TensorBoard("again/second"), model=model)
    return model.train_function is function


@check
def eagerly() -> None:
    if not FEW:
        fitted(hvd.callbacks.TensorBoard("eagerly"), run_eagerly=True)


@check
def compiled() -> None:
    if not FEW:
        fitted(hvd.callbacks.TensorBoard("compiled"), jit_compile=True)


@check
def order() -> Any:
    """The number of ordered pairs of collectives in one graph: plain, recorded, and with a timeline."""
    def two(one: Any, other: Any) -> Any:
        return hvd.allreduce(one, name="one"), hvd.allreduce(other, name="other")

    counts = [_ordered_pairs(tf.function(two).get_concrete_function(tf.zeros(3), tf.zeros(3)).graph)]
    spans.store().start("test")
    counts.append(_ordered_pairs(tf.function(two).get_concrete_function(tf.zeros(3), tf.zeros(3)).graph))
    spans.store().stop("test")
    hvd.start_timeline("timeline.{rank}.json")
    counts.append(_ordered_pairs(tf.function(two).get_concrete_function(tf.zeros(3), tf.zeros(3)).graph))
    hvd.stop_timeline()
    return counts


def _ordered_pairs(graph: Any) -> int:
    ends = [op for op in graph.get_operations() if any(part in op.type for part in ("llreduce", "CollectiveReduce"))]
    assert len(ends) == 2, sorted({op.type for op in graph.get_operations()})

    def before(op: Any, seen: set[Any]) -> set[Any]:
        for other in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if other not in seen:
                seen.add(other)
                before(other, seen)
        return seen

    return sum(other in before(op, set()) for op in ends for other in ends)


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)
