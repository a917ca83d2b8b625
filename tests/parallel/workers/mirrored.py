"""MirroredStrategy on two devices of one process, compared with one device.

Arguments: the names of checks; default: all.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from typing import Any

import keras
import numpy as np
import strategy_training
import tensorflow as tf
from strategy_training import (
    X,
    Y,
    after_an_infinity,
    dataset,
    dense,
    difference,
    equal_masks,
    looped,
    sgd,
    two_inputs,
    under_policy,
    with_auc,
)

import hvkeras as hvd  # it patches Keras
from harness.checks import check, run_checks

tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                           [tf.config.LogicalDeviceConfiguration()] * 2)
STRATEGY = hvd.strategy("mirrored", devices=["CPU:0", "CPU:1"])
apart = functools.partial(strategy_training.apart, STRATEGY)



@check
def fit() -> Any:
    return apart(validation=dataset(), compiled={"metrics": with_auc})


@check
def fit_with_adam_and_class_weight() -> Any:
    return apart(optimizer=lambda: keras.optimizers.Adam(0.01), class_weight={0: 1.0, 1: 3.0})


@check
def clipped_gradients() -> Any:
    """Clip the gradients of the whole batch, not those of each replica."""
    return apart(optimizer=lambda: sgd(global_clipnorm=0.1))


@check
def weight_decay_and_averaged_weights() -> Any:
    return apart(optimizer=lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True))


@check
def steps_per_epoch() -> Any:
    """Building the model does not consume the first batch."""
    return apart(data=dataset().repeat(), steps_per_epoch=3)


@check
def several_steps_an_execution() -> Any:
    return apart(compiled={"steps_per_execution": 3})


@check
def several_inputs() -> Any:
    return apart(two_inputs, data=dataset(inputs=2), validation=dataset(inputs=2))


@check
def a_first_batch_that_does_not_divide() -> Any:
    """In training, Keras weights its rows by replica; so it is only evaluated and predicted here."""
    with STRATEGY.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((X[:5], Y[:5])).batch(5), verbose=0, shuffle=None)
    return float(not np.isfinite(model.get_weights()[0]).all())


@check
def a_replica_without_rows() -> Any:
    return apart(validation=dataset(25))


@check
def dropout_differs_between_replicas() -> Any:
    return equal_masks(STRATEGY)


@check
def batch_normalization() -> Any:
    return apart(lambda: dense(keras.layers.BatchNormalization(synchronized=True)))


@check
def a_loop_of_ones_own() -> Any:
    return difference(*(looped(strategy, lambda tape: tape, dataset(), sgd)
                        for strategy in (STRATEGY, tf.distribute.get_strategy())))


@check
def a_loop_that_clips() -> Any:
    return difference(*(looped(strategy, lambda tape: tape, dataset(), lambda: sgd(global_clipnorm=0.1))
                        for strategy in (STRATEGY, tf.distribute.get_strategy())))


@check
def checkpoints() -> Any:
    """Files written under the strategy load without one."""
    def trained(scope: Any) -> Any:
        with scope:
            model = dense()
            model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(dataset(48), verbose=0, shuffle=None)
        return model

    written, read = trained(STRATEGY.scope()), trained(contextlib.nullcontext())
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=written, optimizer=written.optimizer).save(f"{folder}/one")
        tf.train.Checkpoint(model=read, optimizer=read.optimizer).restore(path).assert_consumed()
    return difference([*written.get_weights(), *(np.asarray(one) for one in written.optimizer.variables)],
                      [*read.get_weights(), *(np.asarray(one) for one in read.optimizer.variables)])


@check
def an_infinity_on_one_replica_skips_the_step_on_all() -> Any:
    return under_policy("mixed_float16", lambda: after_an_infinity(STRATEGY.scope))


if __name__ == "__main__":
    run_checks(chosen=sys.argv[1:])
