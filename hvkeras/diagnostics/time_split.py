"""Time breakdown of a typical step on each rank, from the records of all ranks.

A step lasts from the time at which a rank's gradients are ready to the same time of the next step. It consists of the
remaining communication, the weight update, the fetch of the next batch, and its forward and backward pass. Runs of a
collective are matched between ranks by their indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvkeras.control.heartbeat import GRADIENTS
from hvkeras.diagnostics.record import Array, Record

Runs = tuple[Array, int]  # start and end of each run of a collective, and the index of the first run


def runs_by_key(record: Record) -> dict[str, Runs]:
    """Return the runs of the collectives in a record, by key."""
    return {key: (rows, record.first_runs.get(key, 0)) for key, rows in record.collectives.items()}


def common_runs(runs: Sequence[Runs]) -> tuple[list[Array], int]:
    """Return the runs of a collective that all ranks have recorded.

    Args:
        runs: Recorded runs, by rank.

    Returns:
        Rows of the common runs, by rank, and the index of the first one.
    """
    first = max(start for _, start in runs)
    last = max(first, min(start + len(rows) for rows, start in runs))
    return [rows[first - start : last - start] for rows, start in runs], first


def shortest_times(everyone: Sequence[Mapping[str, Runs]]) -> dict[str, Runs]:
    """Return the shortest time of any rank in each run of each collective.

    Args:
        everyone: Recorded runs by key, for each rank.

    Returns:
        By key: seconds of each run that all ranks of the collective have recorded, and the index of the first run.
    """
    found = {}
    for key in dict.fromkeys(key for runs in everyone for key in runs):
        known, first = common_runs([runs[key] for runs in everyone if key in runs])
        if len(known[0]):
            found[key] = np.min([rows @ (-1.0, 1.0) for rows in known], axis=0), first
    return found


class Cover:
    """Union of spans, which measures how much of an interval it covers."""

    def __init__(self, *spans: Array) -> None:
        rows = np.concatenate(spans)
        rows = rows[rows[:, 1] > rows[:, 0]]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        if len(rows):
            reached = np.maximum.accumulate(rows[:, 1])
            starts = np.concatenate([[True], rows[1:, 0] > reached[:-1]])
            rows = np.column_stack([rows[starts, 0], reached[np.concatenate([starts[1:], [True]])]])
        self.spans = rows
        self.length: float = float((rows @ (-1.0, 1.0)).sum())

    def mean(self, begins: Array, ends: Array) -> float:
        """Return the mean covered time of the intervals from `begins` to `ends`, in seconds."""
        if not len(self.spans):
            return 0.0
        total = np.concatenate([[0.0], np.cumsum(self.spans @ (-1.0, 1.0))])
        edges = self.spans.ravel()
        covered = np.column_stack([total[:-1], total[1:]]).ravel()
        return float(np.mean(np.interp(ends, edges, covered) - np.interp(begins, edges, covered)))


WARM_UP = 5  # first steps to skip (at most half of all), in which TensorFlow traces graphs and fills caches
LATEST = 1000  # maximum number of steps to consider
PAUSE = 5.0  # times the median; longer steps included other work such as validation or a checkpoint


@dataclass(frozen=True)
class TimeSplit:
    """A rank's typical step in seconds: step = input + compute + update + wait + communication.

    Attributes:
        step: Mean time from gradients to gradients, over all steps except pauses (see `PAUSE`).
        input: Waiting for the next batch from a dataset; 0 if no fetch was recorded.
        compute: Remaining time: forward and backward pass, and callbacks; includes the update if it was not recorded.
        wait: Waiting for other ranks: the communication time that the rank would have saved by arriving last. None if
            records of some ranks are missing, and then included in `communication`.
        communication: Exposed communication, without `wait`: collectives that did not overlap with other work.
        hidden: Collectives that overlapped with computing; not part of the step.
        update: Weight update, once all gradients are reduced; 0 if it was not recorded.
    """

    step: float
    input: float
    compute: float
    wait: float | None
    communication: float
    hidden: float
    steps: int = 0
    update: float = 0.0

    @property
    def busy(self) -> float:
        """Time in which the rank works, in seconds: all but communication and waiting for other ranks."""
        return self.input + self.compute + self.update


def time_splits(records: Sequence[Record | None]) -> dict[int, TimeSplit]:
    """Compute the time breakdown of a typical step for each rank with recorded steps.

    Clocks of different ranks are never compared: a rank's wait in a collective is its time there beyond the shortest
    time of any rank in the same run.

    Args:
        records: Record of each rank, in rank order.
    """
    present = [record for record in records if record is not None]
    complete = len(present) == len(records) and all(len(present) >= record.size for record in present)
    compared = shortest_times([runs_by_key(record) for record in present]) if complete else {}
    found = {record.rank: _split(record, compared, complete) for record in present}
    return {rank: split for rank, split in found.items() if split is not None}


def pauses(record: Record) -> tuple[float, float]:
    """Return the total duration of a rank's steps with a pause, and of all its steps, in seconds.

    The first pause is skipped like the first steps, because it includes tracing of the validation step.
    """
    lengths = np.diff(record.stamps[:, 0])[min(WARM_UP, len(record.stamps) // 2):]
    if not len(lengths):
        return 0.0, 0.0
    long = np.flatnonzero(lengths > PAUSE * np.median(lengths))
    lengths[long[:1]] = 0.0
    return float(lengths[long].sum()), float(lengths.sum())


def _split(record: Record, compared: Mapping[str, Runs], complete: bool) -> TimeSplit | None:
    steps = _Steps(record)
    exposed, waits, everything = [np.zeros((0, 2))], [np.zeros((0, 2))], [np.zeros((0, 2))]
    since, until = -np.inf, np.inf
    for key, (runs, first) in runs_by_key(record).items():
        starts = steps.exposed_from(runs) if _of_gradients(record, key) else runs[:, 0]
        exposed.append(np.column_stack([starts, runs[:, 1]]))
        everything.append(runs)
        if first:
            since = max(since, runs[0, 0])
        if not complete or key not in compared:
            continue
        lengths, first_compared = compared[key]
        begin, end = first_compared - first, first_compared - first + len(lengths)
        waits.append(np.column_stack([starts[begin:end], runs[begin:end, 1] - lengths]))
        since = max(since, runs[begin - 1, 1]) if begin else since  # earlier runs are missing on other ranks
        until = min(until, runs[end, 0]) if end < len(runs) else until
    return steps.split(Cover(*exposed), Cover(*waits), Cover(*everything), Cover(record.updates), since, until,
                       complete)


def _of_gradients(record: Record, key: str) -> bool:  # the backward pass does not wait for these collectives
    return record.buckets.get(key, {}).get("operation") == GRADIENTS


class _Steps:
    """Steps of a rank, from gradients to gradients."""

    def __init__(self, record: Record) -> None:
        stamps = record.stamps if record.stamps.shape[1] > 3 else np.pad(record.stamps, ((0, 0), (0, 1)))
        self._ready = stamps[:, 0]
        self._kinds = stamps[:, 2]
        self._inputs = record.inputs
        before = np.concatenate([stamps[:1, 0], stamps[:-1, 0]])
        # Time at which the batch reached the model; if unknown, at which it was fetched; else the middle of the step.
        fetched = self._last_fetch_before(self._ready)
        guess = np.where(fetched > before, fetched, (before + self._ready) / 2)
        self._arrived = np.where(stamps[:, 3] > before, stamps[:, 3], guess)

    def _last_fetch_before(self, times: Array) -> Array:
        if not len(self._inputs):
            return np.zeros_like(times)
        ends = np.maximum.accumulate(self._inputs[:, 1])
        indices = np.searchsorted(ends, times) - 1
        return np.where(indices >= 0, ends[indices], 0.0)

    def exposed_from(self, runs: Array) -> Array:  # a gradient exchange is exposed once all gradients are ready
        if not len(self._ready):
            return runs[:, 0]
        indices = np.minimum(np.searchsorted(self._ready, runs[:, 0]), len(self._ready) - 1)
        in_backward = (runs[:, 0] > self._arrived[indices]) & (runs[:, 0] <= self._ready[indices])
        return np.where(in_backward, self._ready[indices], runs[:, 0])

    def split(self, exposed: Cover, waits: Cover, everything: Cover, updates: Cover, since: float, until: float,
              complete: bool) -> TimeSplit | None:
        """Return the mean over the steps between `since` and `until`, except warm-up and pauses."""
        chosen = self._typical_steps(since, until)
        if not len(chosen):
            return None
        begins, ends, arrivals = self._begins[chosen], self._ends[chosen], self._arrivals[chosen]
        busy = Cover(exposed.spans, self._inputs)
        step = float(np.mean(ends - begins))
        communication = exposed.mean(begins, ends)
        wait = min(waits.mean(begins, ends), communication)
        fetching = max(0.0, busy.mean(begins, arrivals) - exposed.mean(begins, arrivals))
        hidden = max(0.0, everything.mean(begins, ends) - communication)
        computing = max(0.0, step - fetching - communication)
        without_update = busy.mean(begins, ends)
        with_update = Cover(exposed.spans, self._inputs, updates.spans).mean(begins, ends)
        update = min(computing, max(0.0, with_update - without_update))
        return TimeSplit(step, fetching, computing - update, wait if complete else None, communication - wait, hidden,
                         len(chosen), update)

    def _typical_steps(self, since: float, until: float) -> Array:
        """Return the indices of the steps to average, among the steps of the most frequent kind."""
        kinds, counts = np.unique(self._kinds, return_counts=True)
        own = self._kinds == kinds[counts.argmax()] if len(kinds) else np.zeros(0, bool)
        times, arrivals = self._ready[own], self._arrived[own]
        self._begins, self._ends, self._arrivals = times[:-1], times[1:], arrivals[1:]
        lengths = self._ends - self._begins
        if not len(lengths):
            return np.zeros(0, np.int64)
        if len(self._inputs) >= LATEST:  # the fetches of earlier steps are no longer known
            since = max(since, self._inputs[0, 0])
        fits = (self._begins >= since) & (self._ends <= until) & (lengths <= PAUSE * np.median(lengths))
        fits[: min(WARM_UP, len(lengths) // 2)] = False
        return np.flatnonzero(fits)[-LATEST:]
