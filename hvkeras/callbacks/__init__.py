"""Keras callbacks for distributed training, each subject in its own module.

They derive from the callbacks of the Keras version that `tf.keras` refers to when they are imported.
"""

from __future__ import annotations

from hvkeras.errors import require_tensorflow

require_tensorflow()

from hvkeras.callbacks.backup_and_restore import BackupAndRestore
from hvkeras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvkeras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvkeras.callbacks.metric_average import MetricAverageCallback
from hvkeras.callbacks.model_checkpoint import BestModelCheckpoint, ModelCheckpoint
from hvkeras.callbacks.tensorboard import TensorBoard

__all__ = ["BackupAndRestore", "BestModelCheckpoint", "BroadcastGlobalVariablesCallback",
           "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback", "ModelCheckpoint",
           "TensorBoard"]
