"""What estimators have in common: stores, backends, parameters and data. Horovod's path `horovod.spark.common`."""
