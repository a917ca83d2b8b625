"""The file of `BackupAndRestore`: weights and optimizer as Keras saves them, and the other state for resuming.

The file is a `.weights.h5` file that Keras's `model.load_weights` reads. State that Keras's format cannot hold is in
the group `hvkeras`: one JSON text, and the arrays that it refers to by index. Thus model and position are replaced
atomically.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.callbacks.model_files import local_reads, remove_leftovers, replacing
from hvkeras.errors import MachineError, UsageError, explain

_GROUP, _FORMAT, _ARRAY = "hvkeras", 1, "array of this file"


@dataclass(frozen=True)
class Position:
    """Position of training, valid for any number of workers.

    Attributes:
        epoch: The epoch, from 0.
        step: The number of completed steps in that epoch.
        steps: The number of steps per epoch; None if unknown.
        rows: The number of samples per step, over all workers; None if unknown.
        workers: The number of processes that trained.
    """

    epoch: int
    step: int = 0
    steps: int | None = None
    rows: int | None = None
    workers: int = 1

    def step_for(self, steps: int | None, rows: int | None, workers: int) -> int | None:
        """Return the step at which the epoch resumes under the current sizes; None if it cannot be determined.

        Samples that do not fill a whole step are trained on again.

        Args:
            steps: The current number of steps per epoch; None if unknown.
            rows: The current number of samples per step, over all workers; None if unknown.
            workers: The current number of processes.
        """
        same_sizes = (self.steps, self.rows, self.workers) == (steps, rows, workers)
        if not self.step or same_sizes:
            return self.step
        if self.rows and rows:
            step = self.step * self.rows // rows
        elif self.steps and steps:
            step = self.step * steps // self.steps
        elif self.workers == workers:  # the size of the data was known in only one of the runs
            step = self.step
        else:
            return None
        return step if steps is None else min(step, steps - 1)


@dataclass(frozen=True)
class Backup:
    """State in the file besides the model.

    Attributes:
        optimizer: The class name of the optimizer.
        seeds: The states of the layers' seeds.
        random: The states of the global random generators.
        random_at_epoch: The same states when the data of the epoch began; None between epochs.
        callbacks: The states of callbacks, by name.
        rounding_errors: The sums over all hosts of what `Compression.int8` adds to the next gradients: an array or None
            for each trainable variable; None without it.
    """

    position: Position
    optimizer: str = ""
    seeds: Any = None
    random: Any = None
    random_at_epoch: Any = None
    callbacks: Any = None
    rounding_errors: Any = None


class BackupFolder:
    """Folder with the last backup and, optionally, the previous one.

    Args:
        keeps_two: Whether the previous backup is kept.
    """

    def __init__(self, path: Path, keeps_two: bool) -> None:
        self._folder, self._keeps_two = path, keeps_two
        self._file = path / "latest.weights.h5"
        self._former = path / "previous.weights.h5"
        self._keras_file = path / "training_metadata.json"

    def write(self, model: Any, backup: Backup) -> None:
        """Replace the backup.

        Args:
            model: The model with its optimizer.
            backup: The state besides the model.

        Raises:
            MachineError: The file cannot be written; the previous one is kept.
        """
        try:
            former = self._former if self._keeps_two else None
            with replacing(self._file, _bytes_of(model), former) as partial, local_reads(model):
                model.save_weights(str(partial))
                _append_state(partial, backup)
            self._keras_file.unlink(missing_ok=True)  # of Keras's own callback, which this backup replaces
        except OSError as error:
            raise MachineError(explain(f"A backup must be writable ({error.strerror or error})", "give"
                                       " BackupAndRestore a folder with free space",
                                       backup_dir=str(self._folder))) from error

    def load(self, model: Any, optimizer: str) -> tuple[Backup, str] | None:
        """Load weights and optimizer state from the last readable backup into a model.

        Args:
            model: The model, whose optimizer has its variables.
            optimizer: The class name of the optimizer.

        Returns:
            The other state in the file, and a remark for the user or ""; None if there is no backup.

        Raises:
            UsageError: The backup belongs to another model or optimizer, or cannot be read.
        """
        paths = [path for path in (self._file, self._former) if path.exists()]
        for number, path in enumerate(paths):
            try:
                backup = self._read_state(path)
                if backup.optimizer and backup.optimizer != optimizer:
                    raise UsageError(explain("A backup must be resumed with the optimizer that it was made"
                                             " with", "compile with"
                                             " it, or remove the folder to start over", backup=backup.optimizer,
                                             optimizer=optimizer, backup_dir=str(self._folder)))
                with compat.assigning_locally():
                    model.load_weights(str(path))
            except OSError as error:
                if number + 1 < len(paths):
                    continue
                raise UsageError(explain(f"A backup must be readable ({error})", "remove it to start over",
                                         path=str(path))) from error
            except UsageError:
                raise
            except Exception as error:  # Keras may raise anything if the variables do not fit
                raise UsageError(explain(f"A backup must belong to the model that is trained ({type(error).__name__}:"
                                         f" {' '.join(str(error).split())[:500]})", "remove the folder to start over,"
                                         " or give each training run one of its own", path=str(path))) from error
            return backup, f"{path.name}, as {paths[0].name} cannot be read" if number else ""
        return None

    def _read_state(self, path: Path) -> Backup:
        """Read the state besides the model; Keras's own callback stores the epoch in another file."""
        import h5py  # type: ignore[import-untyped]

        with h5py.File(path, "r") as file:
            group = file.get(_GROUP)
            if group is None:
                epoch = json.loads(self._keras_file.read_text())["epoch"] if self._keras_file.exists() else 0
                return Backup(Position(epoch))
            state = json.loads(group["state"][()].tobytes(), object_hook=lambda entry: (
                group[entry[_ARRAY]][()] if _ARRAY in entry else entry))
        if state.pop("format", None) != _FORMAT:
            raise UsageError(explain("A backup must be from this version of hvkeras", "continue with the version that"
                                     " wrote it, or remove it", path=str(path)))
        return Backup(**{**state, "position": Position(**state["position"])})

    def remove_leftovers(self) -> None:
        """Remove files of a killed process."""
        remove_leftovers(self._file)

    def remove(self) -> None:
        """Remove the backup, and the folder if nothing else is in it."""
        self.remove_leftovers()
        for path in (self._file, self._former, self._keras_file):
            path.unlink(missing_ok=True)
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()


def _bytes_of(model: Any) -> int:
    variables = compat.model_weights(model) + compat.optimizer_variables(model.optimizer)
    return sum(int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size for variable in variables)


def _append_state(path: Path, backup: Backup) -> None:
    """Add the state that Keras's format cannot hold to a file written by Keras."""
    import h5py

    with h5py.File(path, "r+") as file:
        group = file.create_group(_GROUP)

        def store_array(array: Any) -> Any:
            if not isinstance(array, np.ndarray):
                raise TypeError(f"a backup cannot hold {type(array)}")
            name = str(len(group))
            group.create_dataset(name, data=array)
            return {_ARRAY: name}

        text = json.dumps({"format": _FORMAT, **asdict(backup)}, default=store_array).encode()
        group.create_dataset("state", data=np.frombuffer(text, np.uint8))
