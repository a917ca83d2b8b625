"""Keras models on DataFrames: `KerasEstimator` trains, `KerasModel` predicts. Horovod's path `horovod.spark.keras`."""

from __future__ import annotations

from hvkeras.spark.keras.estimator import KerasEstimator
from hvkeras.spark.keras.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
