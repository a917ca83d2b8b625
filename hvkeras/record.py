"""The record of a rank: the files between the ranks, which write them, and `hvkeras compare`, which reads them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = "weights.npz"

Array = np.ndarray[Any, Any]


@dataclass
class Record:
    """What one rank knows of its training.

    Attributes:
        rank: The rank.
        size: The number of ranks of its job.
        backend: The engine that served the job.
        logs: The last logs of Keras by kind, `fit` and `evaluate`: numbers by name.
        last_logs: The kind of the very last ones, or "".
        no_steps: Why steps could not be recorded, or "".
        no_samples: Why the samples of a step are not known, or "".
        stamps: float64, [steps, 3]: the time of each step in seconds, the samples until then, and the step's kind.
    """

    rank: int
    size: int
    backend: str
    logs: dict[str, dict[str, float]] = field(default_factory=dict)
    last_logs: str = ""
    no_steps: str = ""
    no_samples: str = ""
    stamps: Array = field(default_factory=lambda: np.zeros((0, 3)))

    def write(self, folder: Path) -> None:
        """Writes the record into a folder, whole or not at all."""
        facts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "stamps"}
        _save(folder / _name(self.rank), {"facts": np.array(json.dumps(facts)), "stamps": self.stamps})

    @classmethod
    def read(cls, folder: Path, rank: int) -> Record | None:
        """Reads a rank's record; None where it has left none."""
        if not (folder / _name(rank)).is_file():
            return None
        with np.load(folder / _name(rank)) as file:
            return cls(**json.loads(str(file["facts"])), stamps=file["stamps"])


def _name(rank: int) -> str:
    return f"rank.{rank}.npz"


def write_weights(folder: Path, values: Sequence[Array]) -> None:
    """Writes the values of variables, in order, into a folder."""
    _save(folder / WEIGHTS, {f"{place:06}": value for place, value in enumerate(values)})


def _save(path: Path, arrays: Mapping[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its stubs take the names for flags
    temporary.replace(path)
