"""Records: files of measurements, which ranks write and commands read."""

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
GATHER = "gather of updated parts"  # operation of the collectives after a sharded update
WELL = "well"  # value of `ended` after a normal end

Array = np.ndarray[Any, Any]


@dataclass
class Record:
    """Record of one rank's training. Times are in seconds since the epoch, by the clock of the rank's host.

    Attributes:
        size: Number of ranks in the job.
        logs: Last Keras logs by kind, `fit` and `evaluate`: numbers by name.
        last_logs: Kind of the most recent logs, or "".
        no_steps: Why steps could not be recorded, or "".
        no_samples: Why the samples per step are unknown, or "".
        stamps: float64, [steps, 4]: time at which this rank's gradients of each step were ready, cumulative samples,
            kind of the step, and time at which the batch reached the model (0 if unknown).
        first_step: Index of the first of these steps among all steps of the job.
        inputs: float64, [fetches, 2]: start and end of each fetch of a training batch from its dataset.
        updates: float64, [updates, 2]: start and end of each weight update, from reduced gradients to new values.
        calls: float64, [calls, 4]: start and end of each call of fit's train function, and the indices of its first
            and last step since the job began; empty for custom training loops.
        collectives: float64, [runs, 2]: start and end of each run of a collective, by its key.
        first_runs: Index of the first of these runs among all runs of the job, by the same key.
        buckets: `label`, `operation`, `how`, and `bytes` of this rank's tensors (None if known only at run time), by
            the same key.
        peak_memory: Peak resident memory so far, in bytes; 0 if unknown.
        gpu: Name of the rank's GPU, several separated by commas; "" without any.
        losses: float64, [losses, 2]: seconds since training began, and fit's loss at that time.
        stalls: Stall warnings.
        ended: `WELL` after a normal end, "" while the rank runs or after a crash, else the error's last line.
        clock_offset: Seconds to add to this rank's times to convert them to the job's common clock, which is that of
            rank 0's host, or of `hvkeras run`.
        clock_uncertainty: Maximum error of the clock offset in seconds; None if unknown.
        sent: First and last pair of a number of steps, and the bytes that the host's network cards had sent by then.
        cores: Cores that the rank may use.
        core_limit: How many of them it may use at a time, which is less with a container's quota.
        busy: CPU seconds that all processes have used on these cores since `began`.
        used: CPU seconds of this rank's process and its children since `began`.
        functions: With --data-parallel, what became of each divided function: its `name`, the `share` of its estimated
            work that all ranks compute, the largest parts of that in `places` (operation and line, share, and why),
            how many operations are `divided` and computed `by_all`, the `rounds` of communication, and their `bytes` of
            known size in a step of 256 rows.
        compiling: Seconds in which XLA compiled the optimizer's update, before the first step.
        began: Start time of the recording.
        written: Time of writing.
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
    sent: list[list[int]] = field(default_factory=list)
    cores: list[int] = field(default_factory=list)
    core_limit: float = 0.0
    busy: float = 0.0
    used: float = 0.0
    functions: list[dict[str, Any]] = field(default_factory=list)
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

    def sent_in_step(self) -> float | None:
        """Return the bytes that the host's network cards sent in a step; None if unknown or nothing."""
        if len(self.sent) < 2 or self.sent[1][0] == self.sent[0][0] or self.sent[1][1] == self.sent[0][1]:
            return None
        return (self.sent[1][1] - self.sent[0][1]) / (self.sent[1][0] - self.sent[0][0])

    @classmethod
    def read(cls, folder: Path, rank: int) -> Record | None:
        """Read a rank's record; return None if there is none."""
        if not (folder / _name(rank)).is_file():
            return None
        with np.load(folder / _name(rank)) as file:
            runs = {name.removeprefix(_RUNS): file[name] for name in file.files if name.startswith(_RUNS)}
            tables = {name: file[name] for name in _TABLES if name in file.files}
            return cls(**json.loads(str(file["facts"])), **tables, collectives=runs)


_TABLES = ("stamps", "inputs", "updates", "calls", "losses")
_RUNS = "collective "


def remove(folder: Path, since: int = 0) -> None:
    """Remove an earlier job's records from a folder.

    Args:
        folder: Folder, which need not exist.
        since: First rank whose record is removed.
    """
    for path in folder.glob("rank.*.npz"):
        number = path.name.split(".")[1]
        if number.isdecimal() and int(number) >= since:
            path.unlink(missing_ok=True)


def _name(rank: int) -> str:
    return f"rank.{rank}.npz"


def write_weights(folder: Path, values: Sequence[Array]) -> None:
    """Write the values of variables into a folder, in order."""
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
