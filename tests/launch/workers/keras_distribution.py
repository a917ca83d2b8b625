"""A script of Keras's distribution API, without a line of hvkeras except the import."""

from __future__ import annotations

import random
import sys

import keras
import numpy as np
import tensorflow as tf
from keras.distribution import (
    DataParallel,
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    get_device_count,
    initialize,
    list_devices,
    set_distribution,
)

import hvkeras  # noqa: F401 - installs the API
from harness.checks import check, run_checks

ROWS = 50
keras.config.set_floatx("float64")


def data():
    numbers = np.random.default_rng(5)
    x = numbers.normal(size=(ROWS, 4))
    return x, x.sum(1, keepdims=True) + numbers.normal(size=(ROWS, 1))


def model(**kwargs):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization(),
              keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile(keras.optimizers.Adam(0.05), "mse", **kwargs)
    return made


def trained(*args, **kwargs):
    """Train a model, and return it and the results."""
    made = model(metrics=["mae"])
    history = made.fit(*args, epochs=2, verbose=0, **kwargs).history
    return made, {"history": history, "weights": [weight.numpy() for weight in made.variables]}


def results_on(made, results, evaluated, predicted):
    return {**results, "evaluation": made.evaluate(*evaluated, verbose=0), "predictions": made.predict(
        predicted, verbose=0)}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return tuple(array[index * 10 : index * 10 + 10] for array in data())


def error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


@check
def devices():
    made = DataParallel()
    return {"list": list_devices(), "count": get_device_count("cpu"), "gpus": list_devices("gpu"),
            "processes": made.num_processes, "replicas": made.num_model_replicas, "shard": made.data_shard_id,
            "deals": made.auto_shard_dataset}


@check
def seeds():
    list_devices()  # joins the job, if initialize() has not
    return [random.random(), np.random.uniform(), float(tf.random.uniform([])), len(keras.random.normal([2]))]


@check
def refusals():
    mesh = DeviceMesh((get_device_count(), 1), ("batch", "model"))
    return [error_of(lambda: set_distribution(ModelParallel(layout_map=LayoutMap(mesh)))),
            error_of(DataParallel(devices=list_devices()[:1]).scope().__enter__),
            error_of(lambda: initialize(num_processes=3)), error_of(lambda: initialize(process_id=7)),
            error_of(initialize), str(keras.distribution.distribution())]


@check
def arrays():
    set_distribution(DataParallel())
    x, y = data()
    return results_on(*trained(x, y, batch_size=16), (x, y), x)


@check
def other_data():
    x, y = data()
    with DataParallel().scope():
        return {"dataset": trained(tf.data.Dataset.from_tensor_slices((x, y)).batch(16))[1],
                "pydataset": trained(Batches())[1],
                "generator": trained(((x, y) for _ in range(4)), steps_per_epoch=2)[1]}


@check
def parts():
    """Each rank has rows of its own: said before, or after the distribution is set."""
    made = DataParallel()
    set_distribution(made)
    made.auto_shard_dataset = False
    found = [error_of(lambda: trained(*data())), error_of(lambda: set_distribution(DataParallel(
        auto_shard_dataset=False)))]
    made.auto_shard_dataset = True
    return found


if __name__ == "__main__":
    run_checks(before=initialize if "initialize" in sys.argv else None)
