"""Rows of a comparison: each combines all runs of one backend on a number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.comparison.result import ONE_PROCESS, Number, Result, quartiles
from hvkeras.diagnostics.time_split import TimeSplit


@dataclass(frozen=True)
class Row:
    """Runs of one job, and their statistics.

    Attributes:
        name: The backend, or `ONE_PROCESS`.
        runs: Its runs, in the order of rounds.
    """

    name: str
    processes: int
    runs: tuple[Result, ...]

    @property
    def good(self) -> list[Result]:
        """Successful runs."""
        return [run for run in self.runs if not run.reason]

    @property
    def reason(self) -> str:
        """Failure of the first run if no run succeeded, else ""."""
        return "" if self.good else self.runs[0].reason

    @property
    def remarks(self) -> tuple[str, ...]:
        """Reasons for unknown values, and failures of some of the runs."""
        failed = [f"run {run.round} failed: {run.reason}" for run in self.runs if run.reason] if self.good else []
        return (*dict.fromkeys(remark for run in self.good for remark in run.remarks), *failed)

    @property
    def step(self) -> tuple[float, float, float] | None:
        """Lower quartile, median and upper quartile of the step time in seconds, over the steps of all runs."""
        return quartiles([seconds for run in self.good for seconds in run.step_times])

    @property
    def medians(self) -> list[float]:
        """Median step time of each run, in seconds."""
        return [run.step[1] for run in self.good if run.step is not None]

    @property
    def range(self) -> tuple[float, float] | None:
        """Range of the step time in seconds: of the runs' medians, or between the quartiles of a single run."""
        if len(self.medians) > 1:
            return min(self.medians), max(self.medians)
        return None if self.step is None else (self.step[0], self.step[2])

    @property
    def spread(self) -> float | None:
        """Range of the runs' medians, divided by the median of all steps; None for a single run."""
        if len(self.medians) < 2 or self.step is None:
            return None
        return (max(self.medians) - min(self.medians)) / self.step[1]

    @property
    def samples(self) -> float | None:
        """Samples of all ranks per second; None if unknown."""
        known = [run.samples_in_step for run in self.good if run.samples_in_step is not None]
        return None if self.step is None or not known else float(np.median(known)) / self.step[1]

    @property
    def samples_range(self) -> tuple[float, float] | None:
        """Samples per second of the slowest and the fastest run; None if unknown, or for a single run."""
        if self.samples is None or self.step is None or len(self.medians) < 2:
            return None
        in_step = self.samples * self.step[1]
        return in_step / max(self.medians), in_step / min(self.medians)

    @property
    def accuracy(self) -> Number | None:
        """Final accuracy of the first run."""
        return next((run.accuracy for run in self.good), None)

    @property
    def loss(self) -> Number | None:
        """Final loss of the first run."""
        return next((run.loss for run in self.good), None)

    @property
    def difference(self) -> float | str | None:
        """Largest difference between the final weights of any run and those of the first backend's first run."""
        known = [run.difference for run in self.good if run.difference is not None]
        texts = [each for each in known if isinstance(each, str)]
        return texts[0] if texts else max((each for each in known if not isinstance(each, str)), default=None)

    @property
    def split(self) -> TimeSplit | None:
        """Time breakdown of a typical step: the mean over all ranks of all runs."""
        return mean_split(split for run in self.good for split in run.splits.values())

    @property
    def bytes_in_step(self) -> float | None:
        """Bytes that a rank passes to collectives in a typical step."""
        return next((run.bytes_in_step for run in self.good if run.bytes_in_step is not None), None)

    @property
    def sent(self) -> float | None:
        """Bytes that rank 0's host sends over its network in a step, in the median run."""
        known = [run.sent for run in self.good if run.sent is not None]
        return float(np.median(known)) if known else None

    @property
    def peak_memory(self) -> int | None:
        """Peak memory in bytes of the rank that needed the most."""
        return max((run.peak_memory for run in self.good if run.peak_memory is not None), default=None)


def mean_split(splits: Iterable[TimeSplit]) -> TimeSplit | None:
    """Return the mean of splits; None without any. `wait` is None if any split lacks it."""
    known = list(splits)
    if not known:
        return None
    waits = [split.wait for split in known if split.wait is not None]

    def mean(part: str) -> float:
        return float(np.mean([getattr(split, part) for split in known]))

    return TimeSplit(step=mean("step"), input=mean("input"), compute=mean("compute"),
                     wait=float(np.mean(waits)) if len(waits) == len(known) else None,
                     communication=mean("communication"), hidden=mean("hidden"), update=mean("update"))


def rows_of(results: Iterable[Result]) -> tuple[Row, ...]:
    """Group the runs by job, in the order of each job's first run."""
    def job(run: Result) -> tuple[str, int]:
        return run.name, run.processes

    results = list(results)
    order = list(dict.fromkeys(map(job, results)))
    grouped = itertools.groupby(sorted(results, key=lambda run: order.index(job(run))), key=job)
    return tuple(Row(name, processes, tuple(runs)) for (name, processes), runs in grouped)


@dataclass(frozen=True)
class Comparison:
    """Finished comparison.

    Attributes:
        sizes: The numbers of processes, ascending, without 1.
        repeat: The requested number of runs of each job.
        cores: A description of the cores that one process used, or "".
        folder: The folder of the ranks' output.
        began: Start time in seconds since the epoch.
        machine: A description of this machine at the start.
        data_parallel: Whether the script is one for one process, whose batches are those of all ranks.
    """

    command: str
    sizes: tuple[int, ...]
    repeat: int
    rows: tuple[Row, ...]
    cores: str
    folder: Path
    began: float
    seconds: float
    machine: Mapping[str, Any] = field(default_factory=dict)
    data_parallel: bool = False

    @property
    def processes(self) -> int:
        """Number of processes of the table: the largest one."""
        return self.sizes[-1]

    @property
    def single(self) -> Row | None:
        """Row of one process, if it ran."""
        return next((row for row in self.rows if row.name == ONE_PROCESS), None)

    @property
    def compared(self) -> list[Row]:
        """Rows of the backends on `processes`."""
        return [row for row in self.rows if row.name != ONE_PROCESS and row.processes == self.processes]

    @property
    def shown(self) -> list[Row]:
        """Rows of the table."""
        return [*self.compared, *([self.single] if self.single else [])]

    @property
    def failed(self) -> bool:
        """True if any run of a backend failed."""
        return any(run.reason for row in self.rows if row.name != ONE_PROCESS for run in row.runs)

    def speed_up(self, row: Row) -> float | None:
        """Return how many times as fast as one process a row trains; None if unknown.

        That is the ratio of the samples per second. With `data_parallel`, steps have the same samples on any number of
        processes, so it is the ratio of the step times, also if samples are unknown.
        """
        single = self.single
        if single is not None and self.data_parallel:
            return None if row.step is None or single.step is None else single.step[1] / row.step[1]
        return None if single is None or row.samples is None or not single.samples else row.samples / single.samples

    def share(self, row: Row) -> float | None:
        """Return the scaling efficiency: the speed-up over the number of processes; None if unknown."""
        speed_up = self.speed_up(row)
        return None if speed_up is None else speed_up / row.processes


def reference_of(rows: Sequence[Row | Result]) -> str:
    """Return the reference for the weights: the first backend that ran; "" if none did."""
    return next((row.name for row in rows if row.name != ONE_PROCESS and not row.reason), "")
