"""`BestModelCheckpoint`: rank 0 keeps the best model on disk."""

from __future__ import annotations

import os
from typing import Literal

from hvkeras import compat
from hvkeras.callbacks.model_checkpoint import ModelCheckpoint
from hvkeras.errors import UsageError, explain
from hvkeras.job.session import current_session
from hvkeras.typing import Logs, PathLike


class BestModelCheckpoint(ModelCheckpoint):
    """Saves the model whenever the monitored value is the best so far; only rank 0 writes.

    A single file (`.keras`, `.h5`, `.weights.h5`) is replaced atomically once the new one is complete. Until then,
    readers get the previous model, and so does a restart after a crash.

    Example:
        model.fit(dataset, validation_data=held_out,
                  callbacks=[hvd.callbacks.BestModelCheckpoint(filepath="best.keras")])

    Args:
        monitor: The key in the logs. At the end of an epoch, all ranks have the same value; if `save_freq` is a
            number, the value is rank 0's own.
        verbose: Whether Keras prints a line at each save.
        save_weights_only: Whether to save the weights instead of the model.
        mode: "min" or "max" for which value is best; with "auto", Keras infers it from the name.
        save_freq: "epoch", or the number of batches between checks.
        filepath: Where to write, as for Keras's `ModelCheckpoint`; can also be set later, through the attribute.

    Raises:
        UsageError: When training begins, `filepath` is not set, or Keras cannot write such a file.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: int | Literal["epoch"] = "epoch", filepath: PathLike | None = None,
    ) -> None:
        # Keras requires a path here, but Horovod's users set it later.
        super().__init__("unset.weights.h5" if save_weights_only else "unset.keras", monitor=monitor, verbose=verbose,
                         save_best_only=True, save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath = filepath

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Checks the path."""
        current_session()
        name = type(self).__name__
        if not isinstance(self.filepath, (str, os.PathLike)) or not os.fspath(self.filepath):
            raise UsageError(explain(f"{name} needs a filepath", f'pass filepath="best.keras" to {name}, or set'
                                     " its attribute filepath before fit()", filepath=self.filepath))
        self.filepath = os.fspath(self.filepath)
        endings = compat.endings_of_saved(self.save_weights_only)
        if not self.filepath.endswith(endings):
            raise UsageError(explain(
                f"The filepath of {name} must end in {' or '.join(endings)}"
                f" {'for weights' if self.save_weights_only else 'for a whole model'}",
                f'pass filepath="best{endings[0]}"', filepath=self.filepath,
                save_weights_only=self.save_weights_only))
        super().on_train_begin(logs)
