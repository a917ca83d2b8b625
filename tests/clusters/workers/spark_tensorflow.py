"""A driver that trains by `MirroredStrategyRunner`: `python spark_tensorflow.py MASTER [CHECK...]`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

from harness.checks import check, run_checks
from hvkeras.spark import MirroredStrategyRunner

spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(
    "spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")


def train(rows: int) -> Any:
    """Trains a small model by Keras's `fit` under the strategy in force; `rows` is the batch of all replicas."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).standard_normal((4 * rows, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(rows)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    config = json.loads(os.environ.get("TF_CONFIG", "null"))
    return {"losses": losses, "replicas": strategy.num_replicas_in_sync, "strategy": type(strategy).__name__,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "task": config and config["task"], "workers": config and len(config["cluster"]["worker"])}


@check
def fit_trains_in_the_scope_of_a_strategy():
    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False)
    return runner.get_num_tasks(), runner.run(train, rows=8), runner.run(train, rows=8)


@check
def the_function_may_make_its_own_strategy():
    def own(rows):
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        together = BarrierTaskContext.get().allGather(str(BarrierTaskContext.get().partitionId()))
        with strategy.scope():
            return train(rows), together, BarrierTaskContext.get().partitionId()

    return MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True).run(own, rows=8)


@check
def local_mode_runs_in_the_driver():
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    found = MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=False).run(train, rows=8)
    return found, os.environ.pop("CUDA_VISIBLE_DEVICES")


@check
def a_failure_is_named():
    def fail():
        if BarrierTaskContext.get().partitionId() == 1:
            raise LookupError("no such thing")

    try:
        MirroredStrategyRunner(num_slots=2, use_gpu=False).run(fail)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@check
def mistakes_are_told():
    found = []
    for arguments in ({"num_slots": 0}, {"num_slots": 2}):
        try:
            MirroredStrategyRunner(**arguments)
        except ValueError as error:
            found.append(str(error))
    settings = spark.sparkContext._conf
    settings.set("spark.ssl.enabled", "true")
    try:
        MirroredStrategyRunner(num_slots=2, use_gpu=False)
    except ValueError as error:
        found.append(str(error))
    local = MirroredStrategyRunner(num_slots=1, use_gpu=False, local_mode=True)  # which has no connections
    found.append(local.sc is spark.sparkContext and local.sc.getConf().get("spark.master"))
    settings.set("spark.ssl.enabled", "false")
    return found


if __name__ == "__main__":
    run_checks(after=spark.stop, chosen=sys.argv[2:])
