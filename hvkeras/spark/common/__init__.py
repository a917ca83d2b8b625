"""Common parts of estimators: stores, backends, parameters and data. Horovod's path `horovod.spark.common`."""
