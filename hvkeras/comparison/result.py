"""Result of one run of a script, from the records of its ranks: speed, final metrics and weight differences."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvkeras.diagnostics.findings import Finding, findings
from hvkeras.diagnostics.record import WEIGHTS, Array, Record
from hvkeras.diagnostics.run_summary import Summary
from hvkeras.diagnostics.time_split import TimeSplit, time_splits
from hvkeras.settings import COMPRESSIONS

WARM_UP = 5  # first steps to skip, at most half of all, in which TensorFlow traces graphs and fills caches
MIN_STEPS = 10  # with fewer steps than this, a median is unreliable

_GAP = r"(?:\s*[:=]\s*|\s+(?:is\s+|of\s+|was\s+)?)"
_NUMBER = r"(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)(?P<percent>\s*%)?(?![\w/])"
_PRINTED = {"accuracy": re.compile(rf"(?:\b|_)acc(?:uracy)?{_GAP}{_NUMBER}", re.IGNORECASE),
            "loss": re.compile(rf"(?:\b|_)loss{_GAP}{_NUMBER}", re.IGNORECASE)}
_LOGGED = {"accuracy": re.compile(r"(?:.*_)?acc(?:uracy)?"), "loss": re.compile(r"loss")}
ONE_PROCESS = "one process"  # the name of the run without a backend
SHARED = ", shared update"  # suffix of the name of a backend with HVKERAS_SHARD_UPDATE=1
COMPRESSED = {name: "" if name == "none" else f", {name}" for name in COMPRESSIONS}  # suffixes, by HVKERAS_COMPRESSION


@dataclass(frozen=True)
class Number:
    """Final metric and its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Result:
    """Result of one run of a job, or the reason for its failure.

    Attributes:
        name: The backend, or `ONE_PROCESS`.
        reason: Why there is no result; "" if there is one.
        step_times: Seconds of each timed step on rank 0.
        samples_in_step: Samples of all ranks in a typical step; None if unknown.
        difference: The difference of the final weights from those of the first backend; see `weight_difference`.
        remarks: Why some values are unknown.
        error_tail: The last lines of standard error of a failed job, else "".
        round: The round of this run, counted from 1.
        seconds: The duration of the job, including startup and shutdown; None if it was not started.
        metrics: The final metrics of Keras by name, from the last evaluate or fit.
        splits: The time breakdown of a typical step, by rank.
        limits: The bottlenecks of the job, the worst first.
        bytes_in_step: Bytes that a rank passes to collectives in a typical step; None if unknown.
        sent: Bytes that rank 0's host sends over its network in a step; None if unknown.
        peak_memory: Peak memory in bytes of the rank that needed the most; None if unknown.
        losses: The loss of fit, [n, 2]: seconds since training began, and the loss.
        compiling: Seconds of XLA's compilation of the optimizer's update on the slowest rank, which no step includes.
        oversubscription: Messages about hosts whose ranks shared cores.
        other_load: Largest fraction of the ranks' cores that other processes used during the run.
    """

    name: str
    processes: int
    reason: str = ""
    step_times: Sequence[float] = ()
    samples_in_step: float | None = None
    accuracy: Number | None = None
    loss: Number | None = None
    difference: float | str | None = None
    remarks: tuple[str, ...] = ()
    error_tail: str = ""
    round: int = 1
    seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    splits: Mapping[int, TimeSplit] = field(default_factory=dict)
    limits: Sequence[Finding] = ()
    bytes_in_step: float | None = None
    sent: float | None = None
    peak_memory: int | None = None
    losses: Sequence[tuple[float, float]] = ()
    compiling: float = 0.0
    oversubscription: tuple[str, ...] = ()
    other_load: float = 0.0

    @property
    def step(self) -> tuple[float, float, float] | None:
        """Lower quartile, median and upper quartile of the step time in seconds; None if unknown."""
        return quartiles(self.step_times)

    @property
    def samples(self) -> float | None:
        """Samples of all ranks per second; None if unknown."""
        return None if self.step is None or self.samples_in_step is None else self.samples_in_step / self.step[1]


def result(name: str, processes: int, records: Sequence[Record | None], printed: str,
           difference: float | str | None = None, data_parallel: bool = False) -> Result:
    """Return the result of a successful job.

    Args:
        name: The backend, or `ONE_PROCESS`.
        records: The record of each rank, in rank order.
        printed: The standard output of rank 0.
        difference: See `Result`.
        data_parallel: Whether it is a script for one process, with `--data-parallel`.
    """
    first = records[0] if records else None
    reason = _unusable(name, processes, first, data_parallel)
    if reason or first is None:
        return Result(name, processes, reason)
    summary = Summary(Path(), processes, records, None, time_splits(records), ())
    times = [float(seconds) for seconds in _steps(first)[:, 0]]
    samples, why = samples_in_step(records)
    few = (f"only {len(times)} step{'s were' if len(times) != 1 else ' was'} timed: train for at least"
           f" {WARM_UP + MIN_STEPS + 1} steps")
    remark = few if len(times) < MIN_STEPS else ""
    return Result(
        name, processes, "", times, samples, final_number("accuracy", first, printed),
        final_number("loss", first, printed), difference, tuple(filter(None, [first.no_steps or remark, why])),
        metrics=first.logs.get(first.last_logs, {}), splits=summary.splits, limits=findings(summary),
        bytes_in_step=bytes_in_step(first),
        sent=first.sent_in_step() if len({record.host for record in records if record is not None}) > 1 else None,
        peak_memory=max((record.peak_memory for record in records if record is not None), default=0) or None,
        losses=[(float(seconds), float(loss)) for seconds, loss in first.losses],
        compiling=max(record.compiling for record in records if record is not None),
        oversubscription=tuple(summary.oversubscription), other_load=summary.other_load[0])


def backend_of(name: str) -> str:
    """Return the backend of a job from its name."""
    return "local" if name == ONE_PROCESS else name.partition(",")[0]


def compression_of(name: str) -> str:
    """Return the compression of a job from its name."""
    return next((compression for compression, suffix in COMPRESSED.items() if suffix and name.endswith(suffix)), "none")


def _unusable(name: str, processes: int, record: Record | None, data_parallel: bool) -> str:
    """Return why a record does not describe the requested job; "" if it does."""
    if record is None:
        return f"rank 0 left no record: {needs_for_record(data_parallel)}"
    if record.size != processes:
        return f"the script ran on {record.size} rank{'s' * (record.size > 1)} instead of {processes}"
    if name != ONE_PROCESS and backend_of(name) != record.backend:
        return (f"the script chose the backend {record.backend} itself: leave it out of hvd.init() and of the script's"
                " arguments")
    if not len(record.stamps) and not record.no_steps and data_parallel:
        return ("no training step was seen that the ranks share: the script must train with fit or train_on_batch of"
                " Keras 3, as a loop of its own is not divided")
    if not len(record.stamps) and not record.no_steps:
        return "no training step was seen: the script needs hvd.DistributedOptimizer or hvd.DistributedGradientTape"
    return ""


def needs_for_record(data_parallel: bool) -> str:
    """Return what must hold for rank 0 to leave a record."""
    needed = "the Python process of the command must import TensorFlow" if data_parallel else (
        "the script must call hvd.init()")
    return f"{needed}, and --out must be a folder that all hosts share"


def _steps(record: Record) -> Array:
    """Return seconds and samples of each step after the warm-up, [steps, 2], for the most frequent kind of step."""
    stamps = record.stamps
    if len(stamps):
        kinds, counts = np.unique(stamps[:, 2], return_counts=True)
        stamps = stamps[stamps[:, 2] == kinds[counts.argmax()]]
    steps: Array = np.diff(stamps[:, :2], axis=0)
    return steps[min(WARM_UP, len(steps) // 2):]


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the lower quartile, the median and the upper quartile; None without values."""
    if not len(seconds):
        return None
    lower, median, upper = np.percentile(seconds, (25, 50, 75))
    return float(lower), float(median), float(upper)


def bytes_in_step(record: Record) -> float | None:
    """Return the bytes that a rank passes to collectives in a typical step.

    Returns:
        The sum over the collectives of most steps; None if there are none, or if a size is unknown.
    """
    runs = {key: record.first_runs.get(key, 0) + len(record.collectives.get(key, ())) for key in record.buckets}
    frequent = [key for key, count in runs.items() if count and 2 * count >= max(runs.values())]
    sizes = [record.buckets[key].get("bytes") for key in frequent]
    if not sizes or None in sizes:
        return None
    return float(sum(size for size in sizes if size is not None))


def samples_in_step(records: Sequence[Record | None]) -> tuple[float | None, str]:
    """Return the samples of all ranks in a typical step.

    Returns:
        The sum over ranks of the median samples per step, and ""; or None, and the reason.
    """
    total = 0.0
    for rank, record in enumerate(records):
        if record is None:
            return None, f"rank {rank} left its record on another host: choose a folder that all share (--out)"
        if record.no_samples:
            return None, f"samples are not known, as {record.no_samples}"
        if len(np.unique(record.stamps[:, 2])) > 1:
            return None, "samples are not known, as there is more than one kind of step"
        samples = _steps(record)[:, 1]
        if not len(samples) or not samples.any():
            return None, "" if not len(samples) else "samples are not known, as no Keras model is called under a tape"
        total += float(np.median(samples))
    return total, ""


def final_number(what: str, record: Record, printed: str) -> Number | None:
    """Return the final accuracy or loss: of Keras's last evaluate or fit, else the last one that rank 0 printed.

    Args:
        what: `accuracy` or `loss`.
        record: The record of rank 0.
        printed: The standard output of rank 0.
    """
    logs = record.logs.get(record.last_logs, {})
    for prefix, source in (("val_", "fit's validation"), ("", f"{record.last_logs}()")):
        for name, value in logs.items():
            if name.startswith(prefix) and _LOGGED[what].fullmatch(name[len(prefix):]):
                return Number(value, source)
    found = list(_PRINTED[what].finditer(printed))
    if not found:
        return None
    return Number(float(found[-1]["number"]) / (100 if found[-1]["percent"] else 1), "what rank 0 printed last")


def weight_difference(first: Path, other: Path) -> float | str | None:
    """Compare the final weights of two jobs, variable by variable in order.

    Args:
        first: The folder of the first job's records.
        other: The folder of the other job's records.

    Returns:
        The largest |a - b| over all variables, divided by the largest |a|, where a are the first job's weights. Text
        with the reason if they cannot be compared. None if a job has no weights.
    """
    if not all((folder / WEIGHTS).is_file() for folder in (first, other)):
        return None
    with np.load(first / WEIGHTS) as ours, np.load(other / WEIGHTS) as theirs:
        if len(ours.files) != len(theirs.files):
            return "other variables"
        largest = difference = 0.0
        for name in ours.files:
            try:
                a, b = ours[name].astype(np.float64), theirs[name].astype(np.float64)
            except (ValueError, zipfile.BadZipFile):
                return "unreadable"
            if a.shape != b.shape:
                return "other shapes"
            if a.size:
                largest, difference = max(largest, float(abs(a).max())), max(difference, float(abs(a - b).max()))
                if not np.isfinite(a).all() or not np.isfinite(b).all():
                    return "not finite"
    return difference / largest if largest else difference
