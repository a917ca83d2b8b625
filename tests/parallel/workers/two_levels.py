"""Two devices in each of two ranks: MirroredStrategy within a rank, hvkeras between them, compared with one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from strategy_training import (
    BATCH,
    X,
    Y,
    after_an_infinity,
    by_one_process,
    dataset,
    dense,
    difference,
    fitted,
    looped,
    sgd,
    under_policy,
)

import hvkeras as hvd
from harness.checks import check, run_checks

tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                           [tf.config.LogicalDeviceConfiguration()] * 2)
hvd.init()
STRATEGY = hvd.strategy("mirrored", devices=["CPU:0", "CPU:1"])
SHARE = BATCH // hvd.size()


def share(rows: int = 96) -> Any:
    mine = np.arange(rows).reshape(-1, BATCH)[:, hvd.rank() * SHARE : (hvd.rank() + 1) * SHARE].ravel()
    return tf.data.Dataset.from_tensor_slices((X[mine], Y[mine])).batch(SHARE)


def apart(optimizer: Any = sgd, build: Any = dense, compiled: Any = None, validated: bool = False) -> float:
    def distributed() -> Any:
        return hvd.DistributedOptimizer(optimizer())

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    both = fitted(STRATEGY.scope(), build, distributed, share(), share() if validated else None,
                  {"callbacks": callbacks}, compiled or {})
    with hvd.alone():
        one = by_one_process(build, optimizer, dataset(), dataset() if validated else None, compiled)
    kept = slice(-1) if validated else slice(None)  # without the predictions, which are of this rank's rows
    return difference(both[kept], one[kept])


@check
def fit_with_sgd_that_clips() -> Any:
    return apart(lambda: sgd(global_clipnorm=0.1))


@check
def fit_with_adam() -> Any:
    return apart(lambda: keras.optimizers.Adam(0.01), validated=True)


@check
def synchronized_normalization() -> Any:
    """Statistics over the devices of all ranks, with one reduction between ranks for all devices of a rank."""
    return apart(build=lambda: dense(keras.layers.BatchNormalization(synchronized=True, momentum=0.5)))


@check
def sparse_gradients() -> Any:
    def build() -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: tf.cast(tf.abs(x) * 3, tf.int32)),
                                 keras.layers.Embedding(30, 3), keras.layers.Flatten(), keras.layers.Dense(1)])

    return apart(build=build)


@check
def a_loop_with_the_tape() -> Any:
    found = looped(STRATEGY, hvd.DistributedGradientTape, share(), sgd,
                   lambda variables: hvd.broadcast_variables(variables, 0), batch=SHARE)
    expected = looped(tf.distribute.get_strategy(), lambda tape: tape, dataset(), sgd)
    found[-2], found[-1] = hvd.allreduce(np.float32(found[-2])), hvd.allreduce(np.float32(found[-1]))
    return difference(found, expected)


@check
def ranks_start_from_the_same_variables() -> Any:
    with STRATEGY.scope():
        variable = tf.Variable(tf.fill([3], float(hvd.rank() + 1)))
    hvd.broadcast_variables([variable], 1)
    return difference(list(STRATEGY.experimental_local_results(variable.value())), [[2.0] * 3] * 1)


@check
def an_infinity_on_one_rank_skips_the_step_on_all() -> Any:
    """The infinity is in the rows of the second rank's second replica."""
    return under_policy("mixed_float16", lambda: after_an_infinity(
        STRATEGY.scope, hvd.DistributedOptimizer, only=hvd.rank() == 1))


@check
def unlike_numbers_of_batches() -> Any:
    """Ranks trim their data to the smallest number of batches."""
    with STRATEGY.scope():
        model = dense()
        model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    mine = share(96 if hvd.rank() else 48)
    model.fit(mine, verbose=0, shuffle=None, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return abs(int(np.asarray(model.optimizer.iterations)) - 2)


@check
def what_cannot_be_done_is_said() -> Any:
    with STRATEGY.scope():
        model = dense()
        model.compile(hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2), "mse")
    try:
        model.fit(share(), verbose=0, shuffle=None)
    except hvd.UnsupportedError as error:
        return float("backward_passes_per_step must be 1 under a strategy within each rank" not in str(error))
    return 1.0


if __name__ == "__main__":
    run_checks(after=hvd.shutdown)
