"""Checkpoints of asynchronous training: one file per epoch, in the format of Keras's `save_weights`.

Only the chief writes them, atomically: each file is written under a temporary name, and then renamed. Checkpoints do
not depend on the cluster, and can be loaded with any number of workers and servers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.compat import asynchronous
from hvkeras.errors import MachineError, UsageError, explain, summary
from hvkeras.host.files import replace_durably

_ENDING = ".weights.h5"
_UNFINISHED = "unfinished-"
_GROUP = "hvkeras"  # the HDF5 group of values that Keras does not save


class Checkpoints:
    """Checkpoints in a folder.

    Args:
        folder: The folder; `save` creates it.
        keep: The number of latest checkpoints to keep.
    """

    def __init__(self, folder: Any, keep: int = 3) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def epochs(self) -> list[int]:
        """Return the epochs that have a checkpoint, in ascending order."""
        found = [re.fullmatch(rf"epoch-(\d+){re.escape(_ENDING)}", path.name) for path in self._folder.glob("epoch-*")]
        return sorted(int(match[1]) for match in found if match)

    def path(self, epoch: int) -> Path:
        """Return the path of the checkpoint after `epoch` epochs."""
        return self._folder / f"epoch-{epoch:05d}{_ENDING}"

    def save(self, model: Any, epochs: int) -> None:
        """Save weights, optimizer state and random seeds.

        Args:
            epochs: The number of completed epochs.

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
        """Restore a model from a checkpoint.

        Args:
            model: A built model with the same layers, with or without a strategy.
            epochs: The number of completed epochs of the checkpoint.

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
            raise UsageError(explain("A checkpoint must belong to the model that is trained"
                                     f" ({summary(error)})", "build the same"
                                     " model, or pass another checkpoint_dir to start over", path=str(path))) from error


def _add_to_file(path: Path, epochs: int, seeds: Sequence[Any]) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path, "a") as file:
        group = file.create_group(_GROUP)
        group.attrs["epochs"] = epochs
        for number, seed in enumerate(seeds):
            group[f"seed_{number}"] = seed


def _read_from_file(path: Path) -> list[Any]:
    import h5py

    with h5py.File(path, "r") as file:
        group = file[_GROUP]
        return [group[f"seed_{number}"][()] for number in range(len(group))]
