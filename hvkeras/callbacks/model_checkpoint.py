"""`ModelCheckpoint` and `BestModelCheckpoint`: models saved by the chief."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvkeras import compat
from hvkeras.callbacks.base import is_chief
from hvkeras.callbacks.model_files import atomic_files, remove_leftovers
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.optimizer import gather_optimizer
from hvkeras.gradients.optimizer_classes import state_of
from hvkeras.job.session import current_session
from hvkeras.training.fit_hooks import shared_by
from hvkeras.typing import Logs, PathLike

if TYPE_CHECKING:
    from hvkeras.typing import Callback

    class _ModelCheckpoint(Callback):
        """Type of Keras's class."""

        filepath: Any  # a path; None until it is set in `BestModelCheckpoint`
        monitor: str
        verbose: int
        save_best_only: bool
        save_weights_only: bool
        save_freq: int | str

        def __init__(
            self, filepath: PathLike, monitor: str = "val_loss", verbose: int = 0, save_best_only: bool = False,
            save_weights_only: bool = False, mode: Literal["auto", "min", "max"] = "auto",
            save_freq: int | Literal["epoch"] = "epoch", initial_value_threshold: float | None = None,
        ) -> None: ...
else:
    _ModelCheckpoint = compat.default_keras().callbacks.ModelCheckpoint


class ModelCheckpoint(_ModelCheckpoint):
    """Keras's `ModelCheckpoint` for several workers: only the chief writes, and replaces files atomically.

    Add the callback to the list on every rank, both under `hvd.init()` and under tf.distribute strategies. A single
    file (`.keras`, `.h5`, `.weights.h5`) is replaced atomically when the new one is complete and on disk. It is a plain
    Keras file that opens without hvkeras and without a strategy. The parameters are those of `ModelCheckpoint` in the
    Keras version that `tf.keras` refers to.

    Example:
        model.fit(dataset, validation_data=held_out,
                  callbacks=[hvd.callbacks.ModelCheckpoint("{epoch:02d}-{val_loss:.2f}.keras")])

    Args:
        filepath: The path, with `{epoch}`, `{val_loss}` and so on for the epoch and the logs.
        monitor: The key in the logs. At the end of an epoch, the value covers the data of all workers and is equal on
            all of them. If `save_freq` is a number, the value is the chief's.
        verbose: Whether Keras prints a line at each save.
        save_best_only: Whether to write only the best model so far.
        save_weights_only: Whether to save the weights instead of the model.
        mode: "min" or "max", the direction of improvement; with "auto", Keras infers it from the name.
        save_freq: "epoch", or the number of batches between writes.
        initial_value_threshold: The value that the first best value must improve on.

    Raises:
        ValueError: Keras cannot write such a file, or an argument is wrong.
    """

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Remove incomplete files of an earlier run that was killed."""
        if is_chief(self.model):
            folder, name = os.path.split(os.fspath(self.filepath))
            if "{" not in folder and "://" not in folder:
                remove_leftovers(Path(folder) / re.sub(r"\{.*?\}", "*", glob.escape(name)))
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save on the chief if `save_freq` is a number of batches."""
        if self.save_freq != "epoch" and state_of(getattr(self.model, "optimizer", None)) is not None:
            self._gather_if_due(batch)
        if self.save_freq != "epoch" and is_chief(self.model):
            compat.settle_direction(self)
            with atomic_files(self.model):
                super().on_train_batch_end(batch, logs)

    def _gather_if_due(self, batch: int) -> None:
        """Gather the state of a sharded optimizer before the chief saves it."""
        counts = ("_batches_seen_since_last_saving", "_last_batch_seen")
        before = {name: getattr(self, name) for name in counts}
        ranks = shared_by(self.model)
        if self._should_save_on_batch(batch) and ranks is not None:
            gather_optimizer(self.model, ranks.ranks[:1])
        if is_chief(self.model):
            self.__dict__.update(before)  # Keras itself counts there

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save on the chief."""
        if is_chief(self.model):
            with atomic_files(self.model):
                super().on_epoch_end(epoch, logs)


class BestModelCheckpoint(ModelCheckpoint):
    """Callback that saves the model whenever the monitored value improves; only rank 0 writes.

    A single file (`.keras`, `.h5`, `.weights.h5`) is replaced atomically when the new one is complete. Until then,
    readers and a restart after a crash get the previous model.

    Example:
        model.fit(dataset, validation_data=held_out,
                  callbacks=[hvd.callbacks.BestModelCheckpoint(filepath="best.keras")])

    Args:
        monitor: The key in the logs. At the end of an epoch, all ranks have the same value. If `save_freq` is a number,
            the value is rank 0's.
        verbose: Whether Keras prints a line at each save.
        save_weights_only: Whether to save the weights instead of the model.
        mode: "min" or "max", the direction of improvement; with "auto", Keras infers it from the name.
        save_freq: "epoch", or the number of batches between checks.
        filepath: The path, as for Keras's `ModelCheckpoint`; may also be set later as an attribute.

    Raises:
        UsageError: When training begins, `filepath` is not set, or Keras cannot write such a file.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: int | Literal["epoch"] = "epoch", filepath: PathLike | None = None,
    ) -> None:
        # Keras requires a path here, but scripts for Horovod set it later.
        super().__init__("unset.weights.h5" if save_weights_only else "unset.keras", monitor=monitor, verbose=verbose,
                         save_best_only=True, save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath = filepath

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check the path."""
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
