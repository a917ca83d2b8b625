"""Keras 3's own training under MultiWorkerMirroredStrategy: the tutorial's code, and `import hvkeras`.

Each check trains on both workers, and on one process on the whole batches, and returns the differences.

Arguments: the names of checks; default: all.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras
import strategy_training
import tensorflow as tf
from strategy_training import (
    after_an_infinity,
    dataset,
    dense,
    equal_masks,
    sgd,
    two_inputs,
    under_policy,
    with_auc,
)

import hvkeras  # noqa: F401 - it mends Keras
from harness.checks import check, run_checks

STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
apart = functools.partial(strategy_training.apart, STRATEGY)



@check
def auc() -> Any:
    return apart(validation=dataset(), compiled={"metrics": with_auc})


@check
def adam_with_class_weight() -> Any:
    return apart(optimizer=lambda: keras.optimizers.Adam(0.01), class_weight={0: 1.0, 1: 3.0})


@check
def steps_per_epoch() -> Any:
    """Building the model must not consume the first batch."""
    return apart(data=dataset().repeat(), steps_per_epoch=3)


@check
def several_steps_an_execution() -> Any:
    """Four batches, three at a time."""
    return apart(compiled={"steps_per_execution": 3})


@check
def a_last_batch_that_is_smaller() -> Any:
    return apart(data=dataset(90), validation=dataset(90))


@check
def several_inputs() -> Any:
    return apart(two_inputs, data=dataset(inputs=2), validation=dataset(inputs=2))


@check
def batch_normalization() -> Any:
    return apart(lambda: dense(keras.layers.BatchNormalization(synchronized=True)))


@check
def a_model_without_input_shape() -> Any:
    return apart(lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)]))


@check
def clipped_gradients() -> Any:
    """Clip the gradients of the whole batch, not those of each worker."""
    return apart(optimizer=lambda: sgd(global_clipnorm=0.1))


@check
def an_infinity_on_one_worker_skips_the_step_on_all() -> Any:
    return under_policy("mixed_float16", lambda: after_an_infinity(STRATEGY.scope))


@check
def bfloat16() -> Any:
    """The last of its 8 bits depend on the order of sums."""
    return under_policy("mixed_bfloat16", lambda: apart() / 1e3)


@check
def dropout_differs_between_workers() -> Any:
    return equal_masks(STRATEGY)


if __name__ == "__main__":
    run_checks(chosen=sys.argv[1:])
