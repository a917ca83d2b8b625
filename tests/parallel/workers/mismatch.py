"""Ranks with different collectives; the argument selects the case."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd

keras: Any = tf.keras


def different_gradients() -> None:
    one, other = (keras.Variable(np.zeros((3, columns))) for columns in (2, 4 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([one, other])
    optimizer.apply([tf.zeros(one.shape), tf.zeros(other.shape)], [one, other])


def a_gradient_that_is_none_on_one_rank() -> None:
    one, other = keras.Variable(np.zeros(2)), keras.Variable(np.zeros(2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([one, other])
    optimizer.apply([tf.zeros(2), tf.zeros(2) if hvd.rank() else None], [one, other])


def a_compiled_update_on_one_rank() -> None:
    one = keras.Variable(np.zeros(2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compile_update=hvd.rank() == 0)
    optimizer.build([one])
    tf.function(lambda: optimizer.apply([tf.zeros(2)], [one]))()


def different_names() -> None:
    hvd.allreduce(tf.zeros(2), name=f"of {hvd.rank()}")


def compiled(optimizer: Any, name: str | None = None) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(optimizer, name=name), loss="mse")
    return model


def train_as_left() -> None:
    compiled(keras.optimizers.SGD(0.1), "left").fit(np.ones((8, 2)), np.ones(8), verbose=0)


def train_as_right() -> None:
    compiled(keras.optimizers.SGD(0.1), "right").fit(np.ones((8, 2)), np.ones(8), verbose=0)


def different_names_in_fit() -> None:
    """The arguments of `compile` are the same, as far as `fit` compares them."""
    (train_as_right if hvd.rank() else train_as_left)()


def a_process_set_on_one_rank() -> None:
    if hvd.rank() == 0:
        hvd.add_process_set([0])
    hvd.allreduce(tf.zeros(2), name="of all")


def a_callback_on_one_rank() -> None:
    """The length of the data is unknown, so ranks agree on the next batch while they read it."""
    def talk(batch: int) -> None:
        if hvd.rank() and batch == 2:
            hvd.allreduce(tf.zeros(2), name="of one")

    talks = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: talk(batch))
    data = tf.data.Dataset.from_generator(lambda: ((np.ones((2, 2)), np.ones(2)) for _ in range(9)), output_signature=(
        tf.TensorSpec((2, 2)), tf.TensorSpec((2,))))
    compiled(keras.optimizers.SGD(0.1)).fit(data, callbacks=[talks], verbose=0)


hvd.init()
{
    "shapes": different_gradients, "none": a_gradient_that_is_none_on_one_rank, "names": different_names,
    "fit": different_names_in_fit, "update": a_compiled_update_on_one_rank,
    "set": a_process_set_on_one_rank, "callback": a_callback_on_one_rank,
}[sys.argv[1]]()
hvd.shutdown()
