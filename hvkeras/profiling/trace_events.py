"""Converts a rank's recording to a trace for Perfetto and Chrome: steps, input, computing and collectives as rows.

The format is Chrome's Trace Event Format (complete and metadata events), which Perfetto opens:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvkeras.profiling.trace_files import Event

STEPS, INPUT, CALLS, COMPUTING = "steps", "input", "train function", "computing"
ROWS = (STEPS, INPUT, CALLS, COMPUTING)  # shown above the rows of collectives

Array = np.ndarray[Any, Any]
_Found = tuple[str, str, float, float, Event]  # row, name, start, end, arguments


def _none(columns: int) -> Array:
    return np.zeros((0, columns))


@dataclass
class Recorded:
    """What a rank recorded around a window of steps; all times are in seconds since the epoch by the rank's own clock.

    Attributes:
        first_stamp: The index of the step that the first timestamp belongs to.
        stamps: float64, [steps]: when this rank's gradients of each step were ready.
        inputs: float64, [n, 2]: start and end of each fetch of a batch.
        calls: float64, [n, 4]: start and end of each call of the train function, and its first and last step.
        collectives: float64, [runs, 2]: start and end of each run, by key.
        buckets: `label`, `operation`, `bytes` and `collective`, by the same key; see
            `hvkeras.profiling.collective_times.Content`.
    """

    first_stamp: int = 0
    stamps: Array = field(default_factory=lambda: np.zeros(0))
    inputs: Array = field(default_factory=lambda: _none(2))
    calls: Array = field(default_factory=lambda: _none(4))
    collectives: dict[str, Array] = field(default_factory=dict)
    buckets: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """One step: its index, its start and end, and when its gradients were ready (0: unknown).

    A span covers several steps, from `step` to `last`, if it is unknown when each of them began.
    """

    step: int
    last: int
    begin: float
    end: float
    computed: float = 0.0


def spans(recorded: Recorded) -> list[Span]:
    """The steps in order: those of the train function's calls or, in custom training loops, consecutive steps.

    In a custom training loop, a step lasts until its last collective ends or, without any, until its gradients are
    ready.
    """
    if len(recorded.calls):
        return [span for call in recorded.calls for span in _of_call(call, recorded)]
    stamps, runs = recorded.stamps, np.concatenate([_none(2), *recorded.collectives.values()])
    if not len(stamps):
        return []
    begin = min([float(stamps[0]), *runs[runs[:, 0] <= stamps[0], 0]])
    return _consecutive(recorded.first_stamp, begin, _ends(stamps, runs), stamps)


def _of_call(call: Array, recorded: Recorded) -> list[Span]:
    """The steps of one call; if there are several, they end when their collectives end."""
    begin, end, first, last = float(call[0]), float(call[1]), int(call[2]), int(call[3])
    if last < first:
        return []
    stamps = recorded.stamps[max(0, first - recorded.first_stamp):max(0, last + 1 - recorded.first_stamp)]
    if len(stamps) != last + 1 - first:  # the steps ran long before the window
        return [Span(first, last, begin, end)]
    within = [runs[(runs[:, 0] >= begin) & (runs[:, 1] <= end)] for runs in recorded.collectives.values()]
    within = [runs for runs in within if len(runs)]
    if within and all(len(runs) == len(stamps) for runs in within):
        ends = np.max([runs[:, 1] for runs in within], axis=0).tolist()  # each runs once per step
    else:
        ends = _ends(stamps, np.concatenate([_none(2), *within]))
    return _consecutive(first, begin, [*ends[:-1], end], stamps)


def _consecutive(first: int, begin: float, ends: Sequence[float], stamps: Array) -> list[Span]:
    # A busy rank may record the timestamp late, but gradients are ready before their collectives end.
    return [Span(first + place, first + place, since, until, min(float(stamp), until))
            for place, (since, until, stamp) in enumerate(zip([begin, *ends[:-1]], ends, stamps, strict=True))]


def _ends(stamps: Array, runs: Array) -> list[float]:
    """When steps end: with the last of their collectives, all of which precede those of the next step.

    The collectives between two timestamps are therefore split at their widest gap, in which the next step computes.
    """
    runs = runs[np.argsort(runs[:, 0])]
    reached = np.maximum.accumulate(np.concatenate([[-math.inf], runs[:, 1]]))
    places = np.searchsorted(runs[:, 0], stamps, side="right")
    ends = []
    for stamp, later, since, until in zip(stamps, [*stamps[1:], math.inf], places, [*places[1:], len(runs)],
                                          strict=True):
        busy = np.maximum(reached[since:until + 1], stamp)  # end of the busy time before each run, and after the last
        ends.append(float(busy[np.argmax(np.append(runs[since:until, 0], later) - busy)]))
    return ends


def events(recorded: Recorded, rank: int, first: int, after: int, offset: float = 0.0) -> list[Event]:
    """Makes the events of a window of steps.

    Args:
        recorded: The recording of these steps and those around them.
        rank: The rank, which is the process ID in the trace.
        first: The first step.
        after: The step after the last one.
        offset: Seconds to add to this rank's times to convert them to the common clock.

    Returns:
        The metadata events that name the rows, then the complete events in order of time.
    """
    everyone = spans(recorded)
    wanted = [span for span in everyone if first <= span.last and span.step < after]
    if not wanted:
        return []
    before = [span.end for span in everyone if span.last < first]
    since, until = min(before[-1] if before else math.inf, wanted[0].begin), wanted[-1].end
    found: list[_Found] = [
        *((STEPS, _named(span.step, span.last), span.begin, span.end, {"step": span.step}) for span in wanted),
        *((INPUT, "input", float(begin), float(end), {}) for begin, end in recorded.inputs if since <= begin < until),
        *_calls(recorded.calls, first, after),
        *_computing(wanted, recorded.inputs),
        *_collectives(recorded, wanted, since, until),
    ]
    labels = dict.fromkeys([*ROWS, *sorted((row for row, *_ in found if row not in ROWS), key=_natural)])
    rows = {row: place + 1 for place, row in enumerate(labels) if any(each[0] == row for each in found)}
    made = [{"name": name, "cat": "collective" if row not in ROWS else row, "ph": "X", "pid": rank, "tid": rows[row],
             "ts": round((begin + offset) * 1e6, 3), "dur": round(max(0.0, end - begin) * 1e6, 3), "args": arguments}
            for row, name, begin, end, arguments in found]
    return [*_names(rows, rank), *sorted(made, key=lambda event: (event["ts"], event["tid"]))]


def _names(rows: Mapping[str, int], rank: int) -> Iterator[Event]:
    for row, number in rows.items():
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": row}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _calls(calls: Array, first: int, after: int) -> Iterator[_Found]:
    for begin, end, start, last in calls:
        if first <= last and start < after:
            yield CALLS, f"train function, {_named(int(start), int(last))}", float(begin), float(end), {}


def _natural(label: str) -> list[tuple[int, str]]:
    """A sort key that puts part 2 before part 10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", label)]


def _named(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _computing(steps: Sequence[Span], inputs: Array) -> Iterator[_Found]:
    """The time from the start of each step, or the end of its input, until its gradients are ready."""
    for span in steps:
        if span.computed:
            fetched = inputs[(inputs[:, 1] > span.begin) & (inputs[:, 1] <= span.computed), 1]
            begin = float(fetched.max()) if len(fetched) else span.begin
            yield COMPUTING, "gradients", begin, span.computed, {"step": span.step}


def _collectives(recorded: Recorded, steps: Sequence[Span], since: float, until: float) -> Iterator[_Found]:
    begins = [span.begin for span in steps]
    for key, runs in recorded.collectives.items():
        known = recorded.buckets.get(key, {})
        label = known.get("label") or key
        for began, ended in runs:
            if not since <= began < until:
                continue
            arguments: Event = {"collective": label, "operation": known.get("operation"), "bytes": known.get("bytes")}
            place = bisect.bisect_right(begins, began) - 1
            if place >= 0 and began < steps[place].end:
                arguments["step"] = steps[place].step
            yield label, str(known.get("collective") or "collective"), float(began), float(ended), arguments
