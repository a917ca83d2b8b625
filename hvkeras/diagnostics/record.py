"""The record of a rank: the file that each rank writes and that commands read."""

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
GATHER = "gather of updated parts"  # the operation of the collectives after an update that the ranks share
WELL = "well"  # the value of `ended` for a rank that ended well

Array = np.ndarray[Any, Any]


@dataclass
class Record:
    """The record of one rank's training. Times are in seconds since the epoch, by the clock of the rank's host.

    Attributes:
        rank: The rank.
        size: The number of ranks in its job.
        backend: The engine of the job.
        logs: The last logs of Keras by kind, `fit` and `evaluate`: numbers by name.
        last_logs: The kind of the most recent logs, or "".
        no_steps: Why steps could not be recorded, or "".
        no_samples: Why the samples of a step are not known, or "".
        stamps: float64, [steps, 4]: when this rank's gradients of each step were ready, the cumulative samples, the
            step's kind, and when the batch reached the model (0 if unknown).
        first_step: The index of the first of these steps among all steps of the job.
        host: The rank's host.
        pid: Its process ID.
        inputs: float64, [fetches, 2]: start and end of each fetch of a training batch from its dataset.
        updates: float64, [updates, 2]: when the reduced gradients of each step were there, and when all variables had
            their new values.
        calls: float64, [calls, 4]: start and end of each call of fit's train function, and the indices of its first
            and last step since the job began; empty for custom training loops.
        collectives: float64, [runs, 2]: start and end of each run of a collective, by its key.
        first_runs: The index of the first of these runs among all runs of the job, by the same key.
        buckets: `label`, `operation`, `how`, and `bytes` of this rank's tensors (None if known only at run time), by
            the same key.
        peak_memory: The peak resident memory so far, in bytes; 0 if unknown.
        gpu: What users call the GPU that the rank computes on, several separated by commas; "" if it has none.
        losses: float64, [losses, 2]: seconds since training began, and fit's loss at that time.
        stalls: The warnings about late ranks.
        ended: `WELL` after a normal end, "" while the rank runs or after a crash, else the error's last line.
        clock_offset: Seconds to add to this rank's times to convert them to the job's common clock, which is that of
            rank 0's host, or of `hvkeras run`.
        clock_uncertainty: The maximum error of that offset in seconds; None while it is unknown.
        compiling: Seconds in which XLA compiled the optimizer's update, before the first step.
        began: When recording began.
        written: When the record was written.
    """

    rank: int
    size: int
    backend: str
    logs: dict[str, dict[str, float]] = field(default_factory=dict)
    last_logs: str = ""
    no_steps: str = ""
    no_samples: str = ""
    stamps: Array = field(default_factory=lambda: np.zeros((0, 4)))
    first_step: int = 0
    host: str = ""
    pid: int = 0
    inputs: Array = field(default_factory=lambda: np.zeros((0, 2)))
    updates: Array = field(default_factory=lambda: np.zeros((0, 2)))
    calls: Array = field(default_factory=lambda: np.zeros((0, 4)))
    collectives: dict[str, Array] = field(default_factory=dict)
    first_runs: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, dict[str, Any]] = field(default_factory=dict)
    peak_memory: int = 0
    gpu: str = ""
    losses: Array = field(default_factory=lambda: np.zeros((0, 2)))
    stalls: list[str] = field(default_factory=list)
    ended: str = ""
    clock_offset: float = 0.0
    clock_uncertainty: float | None = None
    compiling: float = 0.0
    began: float = 0.0
    written: float = 0.0

    def write(self, folder: Path) -> None:
        """Write the record into a folder atomically."""
        facts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)
                 if each.name not in (*_TABLES, "collectives")}
        tables = {name: getattr(self, name) for name in _TABLES}
        runs = {f"{_RUNS}{key}": rows for key, rows in self.collectives.items()}
        _save(folder / _name(self.rank), {"facts": np.array(json.dumps(facts)), **tables, **runs})

    @classmethod
    def read(cls, folder: Path, rank: int) -> Record | None:
        """Read a rank's record; None if there is none."""
        if not (folder / _name(rank)).is_file():
            return None
        with np.load(folder / _name(rank)) as file:
            runs = {name.removeprefix(_RUNS): file[name] for name in file.files if name.startswith(_RUNS)}
            tables = {name: file[name] for name in _TABLES if name in file.files}
            return cls(**json.loads(str(file["facts"])), **tables, collectives=runs)


_TABLES = ("stamps", "inputs", "updates", "calls", "losses")
_RUNS = "collective "


def remove(folder: Path, since: int = 0) -> None:
    """Remove an earlier job's records from a folder: those of ranks from `since` on.

    Args:
        folder: The folder, which need not exist.
        since: The first of these ranks.
    """
    for path in folder.glob("rank.*.npz"):
        number = path.name.split(".")[1]
        if number.isdecimal() and int(number) >= since:
            path.unlink(missing_ok=True)


def _name(rank: int) -> str:
    return f"rank.{rank}.npz"


def write_weights(folder: Path, values: Sequence[Array]) -> None:
    """Write the values of variables, in order, into a folder."""
    _save(folder / WEIGHTS, {f"{index:06}": value for index, value in enumerate(values)})


def _save(path: Path, arrays: Mapping[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stubs mistake the names for options
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
