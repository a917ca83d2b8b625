"""Alias module for `horovod.keras.callbacks`."""

from __future__ import annotations

from typing import Literal

from hvkeras import callbacks
from hvkeras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hvkeras.typing import PathLike

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
           "LearningRateWarmupCallback", "MetricAverageCallback"]


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """`hvkeras.callbacks.BestModelCheckpoint` with the parameter order of `horovod.keras`.

    Example:
        model.fit(dataset, validation_data=held_out,
                  callbacks=[hvd.callbacks.BestModelCheckpoint(filepath="best.keras")])

    Args:
        monitor: The key in the logs.
        verbose: Whether Keras prints a line at each save.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or the number of batches between checks.
        filepath: Where to write; can be set later through the attribute `filepath`.
        save_weights_only: Whether to save the weights instead of the model.

    Raises:
        UsageError: As for `hvkeras.callbacks.BestModelCheckpoint`.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: Literal["auto", "min", "max"] = "auto",
        save_freq: int | Literal["epoch"] = "epoch", filepath: PathLike | None = None, save_weights_only: bool = False,
    ) -> None:
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq, filepath)
