"""What jobs of one script did, from the records of their ranks: how fast, how well, and how alike."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvkeras.record import WEIGHTS, Array, Record

ONE_PROCESS = "one process"
WARM_UP = 5  # first steps that are left out, or half of few: TensorFlow traces graphs and fills caches in them
FEW = 10  # steps below which a median says little

_GAP = r"(?:\s*[:=]\s*|\s+(?:is\s+|of\s+|was\s+)?)"
_NUMBER = r"(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf)(?P<percent>\s*%)?(?![\w/])"
_PRINTED = {"accuracy": re.compile(rf"(?:\b|_)acc(?:uracy)?{_GAP}{_NUMBER}", re.IGNORECASE),
            "loss": re.compile(rf"(?:\b|_)loss{_GAP}{_NUMBER}", re.IGNORECASE)}
_LOGGED = {"accuracy": re.compile(r"(?:.*_)?acc(?:uracy)?"), "loss": re.compile(r"loss")}


@dataclass(frozen=True)
class Number:
    """A final number, and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Result:
    """A row of the table: a job that ran, or why it did not.

    Attributes:
        name: The backend, or `ONE_PROCESS`.
        processes: How many ranks it had.
        reason: Why there are no figures, or "".
        step: Quartiles of the step time in seconds: lower, median, upper; None if unknown.
        samples: Samples of all ranks per second; None if unknown.
        accuracy: The final accuracy, or None.
        loss: The final loss, or None.
        difference: How far the final weights are from those of the first backend; see `weight_difference`.
        remarks: Why something is unknown.
        has_last_words: Whether the job failed, so that the end of its standard error says why.
    """

    name: str
    processes: int
    reason: str = ""
    step: tuple[float, float, float] | None = None
    samples: float | None = None
    accuracy: Number | None = None
    loss: Number | None = None
    difference: float | str | None = None
    remarks: tuple[str, ...] = ()
    has_last_words: bool = False


def result(name: str, processes: int, records: Sequence[Record | None], printed: str,
           difference: float | str | None = None) -> Result:
    """Sums up a job that ended well.

    Args:
        name: The backend, or `ONE_PROCESS`.
        processes: How many ranks it was started with.
        records: What each rank recorded, in rank order.
        printed: What rank 0 printed to standard output.
        difference: How far its weights are from those of the first backend.
    """
    first = records[0] if records else None
    reason = _unusable(name, processes, first)
    if reason or first is None:
        return Result(name, processes, reason)
    step = step_time(first)
    samples, why = samples_in_step(records)
    timed = len(_steps(first))
    few = f"only {timed} step{'s were' if timed != 1 else ' was'} timed" if timed < FEW else ""
    remarks = [first.no_steps or few, why]
    rate = None if step is None or samples is None else samples / step[1]
    return Result(name, processes, "", step, rate, final_number("accuracy", first, printed),
                  final_number("loss", first, printed), difference, tuple(filter(None, remarks)))


def _unusable(name: str, processes: int, record: Record | None) -> str:
    """Why a record says nothing of the job that was asked for; "" if it does."""
    if record is None:
        return "rank 0 left no record: the script must call hvd.init(), and --out be a folder that all hosts share"
    if record.size != processes:
        return f"the script ran on {record.size} rank{'s' * (record.size > 1)} instead of {processes}"
    if name not in (ONE_PROCESS, record.backend):
        return (f"the script chose the backend {record.backend} itself: leave it out of hvd.init() and of the script's"
                " arguments")
    if not len(record.stamps) and not record.no_steps:
        return "no training step was seen: the script needs hvd.DistributedOptimizer or hvd.DistributedGradientTape"
    return ""


def _steps(record: Record) -> Array:
    """Seconds and samples of each step, [steps, 2], after the warm-up; of the most frequent kind of step."""
    stamps = record.stamps
    if len(stamps):
        kinds, counts = np.unique(stamps[:, 2], return_counts=True)
        stamps = stamps[stamps[:, 2] == kinds[counts.argmax()]]
    steps: Array = np.diff(stamps[:, :2], axis=0)
    return steps[min(WARM_UP, len(steps) // 2):]


def step_time(record: Record) -> tuple[float, float, float] | None:
    """Quartiles of a rank's step time in seconds; None without two steps."""
    seconds = _steps(record)[:, 0]
    if not len(seconds):
        return None
    lower, median, upper = np.percentile(seconds, (25, 50, 75))
    return float(lower), float(median), float(upper)


def samples_in_step(records: Sequence[Record | None]) -> tuple[float | None, str]:
    """The samples of all ranks in a typical step.

    Args:
        records: What each rank recorded.

    Returns:
        The sum over ranks of the median step's samples, or None, and why it is not known.
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
    """Finds the last accuracy or loss: the one of Keras's last evaluate or fit, else the last that rank 0 printed.

    Args:
        what: `accuracy` or `loss`.
        record: What rank 0 recorded.
        printed: What rank 0 printed to standard output.
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
    """Compares the final weights of two jobs, variable by variable in order.

    Args:
        first: The folder of the first job's records.
        other: The folder of the other's.

    Returns:
        The largest |a - b| over all variables, divided by the largest |a|, where a is the first's; or what
        makes them incomparable; None if one of them has none.
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
