"""A driver that was written for Horovod: `hvkeras exec --as-horovod spark_horovod.py MASTER`."""

from __future__ import annotations

import sys

import horovod.spark
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import HDFSStore, LocalStore, Store
from horovod.spark.keras import KerasEstimator, KerasModel
from pyspark.sql import SparkSession

from harness.checks import check, run_checks

spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(
    "spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")


@check
def functions_import_horovod():
    def train():
        import horovod.tensorflow.keras as hvd

        hvd.init()
        return hvd.rank(), float(hvd.allreduce(1.0, op=hvd.Sum)), hvd.__name__

    return horovod.spark.run(train, num_proc=2, use_gloo=True, verbose=2)


@check
def its_names_are_here():
    return [each.__module__ for each in (SparkBackend, HDFSStore, LocalStore, Store, KerasEstimator, KerasModel)]


if __name__ == "__main__":
    run_checks(after=spark.stop, chosen=sys.argv[2:])
