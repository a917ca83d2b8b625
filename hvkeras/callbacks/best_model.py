"""`BestModelCheckpoint`: rank 0 keeps the best model on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvkeras import compat, context
from hvkeras.callbacks.leading import leads
from hvkeras.errors import UsageError, explain

_ModelCheckpoint: Any = compat.default_keras().callbacks.ModelCheckpoint
_SINGLE_FILES = (".keras", ".h5")


class BestModelCheckpoint(_ModelCheckpoint):  # type: ignore[misc]  # Keras ships no types
    """Saves the model whenever the monitored value is the best so far; rank 0 alone writes.

    A single file (`.keras`, `.h5`, `.weights.h5`) is replaced at once when the new one is complete: who reads it
    meanwhile gets the former model, and so does who restarts after a crash.

    Example:
        model.fit(dataset, validation_data=held_out,
                  callbacks=[hvd.callbacks.BestModelCheckpoint(filepath="best.keras")])

    Args:
        monitor: The key in the logs. All ranks have the same value there at the end of an epoch; with
            `save_freq` a number, it is rank 0's.
        verbose: Whether Keras prints a line at each save.
        save_weights_only: Whether to save the weights instead of the model.
        mode: "min" or "max" for what is best; with "auto" Keras tells it from the name.
        save_freq: "epoch", or after how many batches to look.
        filepath: Where to write, as for Keras's `ModelCheckpoint`; can be set later, as the attribute.

    Raises:
        UsageError: When training begins: there is no filepath, or one that Keras cannot write.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False, mode: str = "auto",
        save_freq: Any = "epoch", filepath: Any = None,
    ) -> None:
        # Keras insists on a path here, which Horovod's users set later.
        super().__init__("unset.weights.h5" if save_weights_only else "unset.keras", monitor=monitor, verbose=verbose,
                         save_best_only=True, save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that there is a path."""
        context.current()
        name = type(self).__name__
        if not isinstance(self.filepath, (str, os.PathLike)) or not os.fspath(self.filepath):
            raise UsageError(explain(f"{name} must know where to write", f'pass filepath="best.keras" to {name}, or set'
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

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves on rank 0, where `save_freq` is a number of batches."""
        if self.save_freq != "epoch" and leads(self.model):
            compat.settle_direction(self)
            with _files_at_once(self.model):
                super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves on rank 0, if the epoch was the best."""
        if leads(self.model):
            with _files_at_once(self.model):
                super().on_epoch_end(epoch, logs)


@contextlib.contextmanager
def _files_at_once(model: Any) -> Iterator[None]:
    """Meanwhile `model.save` and `model.save_weights` replace a file only when the new one is complete."""
    names = ("save", "save_weights")
    before = {name: model.__dict__[name] for name in names if name in model.__dict__}
    model.__dict__.update({name: _at_once(getattr(model, name)) for name in names})
    try:
        yield
    finally:
        for name in names:
            del model.__dict__[name]
        model.__dict__.update(before)


def _at_once(write: Callable[..., Any]) -> Callable[..., Any]:
    def save(filepath: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(filepath)
        if "://" in str(filepath) or path.suffix not in _SINGLE_FILES:
            write(filepath, *args, **kwargs)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{path.name}")
        try:
            write(str(partial), *args, **kwargs)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    return save
