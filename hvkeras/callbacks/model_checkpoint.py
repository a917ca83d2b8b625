"""`ModelCheckpoint`: the chief keeps models on disk."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from hvkeras import compat
from hvkeras.callbacks.chief import leads
from hvkeras.callbacks.model_files import files_at_once, remove_leftovers

_ModelCheckpoint: Any = compat.default_keras().callbacks.ModelCheckpoint


class ModelCheckpoint(_ModelCheckpoint):  # type: ignore[misc]  # Keras ships no types
    """Keras's `ModelCheckpoint` for several workers: the chief alone writes, and no file is ever half there.

    It goes into the list of callbacks on every rank, under `hvd.init()` and under strategies of tf.distribute alike.
    A single file (`.keras`, `.h5`, `.weights.h5`) is replaced at once when the new one is complete and on the
    disk. It is plain Keras's: it opens without hvkeras and without a strategy. The parameters are those of the
    `ModelCheckpoint` of the Keras that `tf.keras` is.

    Example:
        model.fit(dataset, validation_data=held_out,
                  callbacks=[hvd.callbacks.ModelCheckpoint("{epoch:02d}-{val_loss:.2f}.keras")])

    Args:
        filepath: Where to write, with the epoch and the logs as `{epoch}`, `{val_loss}` and so on.
        monitor: The key in the logs. At the end of an epoch all workers have the same value there, that of all
            workers' data; with `save_freq` a number, it is the chief's.
        verbose: Whether Keras prints a line at each save.
        save_best_only: Whether to write only what is the best so far.
        save_weights_only: Whether to save the weights instead of the model.
        mode: "min" or "max" for what is best; with "auto" Keras tells it from the name.
        save_freq: "epoch", or after how many batches to write.
        initial_value_threshold: What the first best value must better.

    Raises:
        ValueError: Keras cannot write such a file, or an argument is wrong.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Removes what an earlier run was killed over."""
        if leads(self.model):
            folder, name = os.path.split(os.fspath(self.filepath))
            if "{" not in folder and "://" not in folder:
                remove_leftovers(Path(folder) / re.sub(r"\{.*?\}", "*", glob.escape(name)))
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves on the chief, where `save_freq` is a number of batches."""
        if self.save_freq != "epoch" and leads(self.model):
            compat.settle_direction(self)
            with files_at_once(self.model):
                super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves on the chief."""
        if leads(self.model):
            with files_at_once(self.model):
                super().on_epoch_end(epoch, logs)
