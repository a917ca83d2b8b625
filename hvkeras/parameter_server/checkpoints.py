"""Checkpoints of asynchronous training: one file per epoch, in the format of Keras's `save_weights`.

Only the chief writes them. It first writes each under another name, so that a killed process leaves no partial file.
Checkpoints do not depend on the cluster: they can be loaded with another number of workers and servers, or without any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.compat import asynchronous
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.files import replace_durably

_ENDING = ".weights.h5"
_UNFINISHED = "unfinished-"
_OURS = "hvkeras"  # the group in the file that Keras does not know


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: The folder; created when the first checkpoint is written.
        keep: The number of newest checkpoints to keep.
    """

    def __init__(self, folder: Any, keep: int = 3) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def epochs(self) -> list[int]:
        """Returns the epochs after which there is a checkpoint, in ascending order."""
        found = [re.fullmatch(rf"epoch-(\d+){re.escape(_ENDING)}", path.name) for path in self._folder.glob("epoch-*")]
        return sorted(int(match[1]) for match in found if match)

    def path(self, epoch: int) -> Path:
        """Returns the path of the checkpoint after a number of epochs."""
        return self._folder / f"epoch-{epoch:05d}{_ENDING}"

    def save(self, model: Any, epochs: int) -> None:
        """Writes weights, optimizer and random seeds.

        Args:
            model: The model.
            epochs: The number of epochs that it was trained for.

        Raises:
            MachineError: The file cannot be written.
        """
        path = self.path(epochs)
        unfinished = path.with_name(_UNFINISHED + path.name)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            model.save_weights(unfinished, overwrite=True)
            _add_to_file(unfinished, epochs, [np.asarray(seed) for seed in asynchronous.seed_states(model)])
            replace_durably(unfinished, path)
            for old in self.epochs()[: -self._keep]:
                self.path(old).unlink(missing_ok=True)
        except OSError as error:
            raise MachineError(explain(f"Checkpoints must be writable ({error})", "pass checkpoint_dir= a folder with"
                                       " free space", path=str(path))) from error

    def restore(self, model: Any, epochs: int) -> None:
        """Restores a model from a checkpoint.

        Args:
            model: A model with the same layers and all its variables, under any strategy or none.
            epochs: The number of epochs after which the checkpoint was written.

        Raises:
            UsageError: The file belongs to another model, or is not a checkpoint.
        """
        path = self.path(epochs)
        try:
            model.load_weights(path)
            seeds = _read_from_file(path)
            for variable, value in zip(asynchronous.seed_states(model), seeds, strict=True):
                compat.as_tf_variable(variable).assign(value)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(explain("A checkpoint must belong to the model that is trained"
                                     f" ({reason})", "build the same"
                                     " model, or pass another checkpoint_dir to start over", path=str(path))) from error


def _add_to_file(path: Path, epochs: int, seeds: Sequence[Any]) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path, "a") as file:
        group = file.create_group(_OURS)
        group.attrs["epochs"] = epochs
        for number, seed in enumerate(seeds):
            group[f"seed_{number}"] = seed


def _read_from_file(path: Path) -> list[Any]:
    import h5py

    with h5py.File(path, "r") as file:
        group = file[_OURS]
        return [group[f"seed_{number}"][()] for number in range(len(group))]
