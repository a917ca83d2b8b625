"""Conversion of a rank's record to Chrome trace events, with steps, input, computing and collectives as rows.

The format is Chrome's Trace Event Format (complete and metadata events), which Perfetto also reads:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import bisect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras.diagnostics.record import Array, Record
from hvkeras.diagnostics.trace_files import Event

STEPS, INPUT, CALLS, COMPUTING, UPDATE = "steps", "input", "train function", "computing", "update"
ROWS = (STEPS, INPUT, CALLS, COMPUTING, UPDATE)  # shown above the rows of collectives
BEFORE = 1024  # steps before the window to consider in custom training loops

_Found = tuple[str, str, float, float, Event]  # row, name, start, end, arguments


@dataclass(frozen=True)
class Step:
    """One step, or the steps from `index` to `last` if their boundaries are unknown.

    Attributes:
        ready: Time at which the gradients were ready; 0 if unknown.
    """

    index: int
    last: int
    begin: float
    end: float
    ready: float = 0.0


def _steps(record: Record, first: int, after: int) -> list[Step]:
    """Return the steps of a window and some around it.

    In `fit`, steps are bounded by calls of the train function. In custom training loops, a step lasts until its last
    collective ends or, without collectives, until its gradients are ready.
    """
    if len(record.calls):
        near = (record.calls[:, 3] >= first - 1) & (record.calls[:, 2] <= after)
        return [step for call in record.calls[near] for step in _of_call(call, record)]
    skipped = max(0, first - BEFORE - record.first_step)
    ready, runs = record.stamps[skipped:, 0], np.concatenate([np.zeros((0, 2)), *record.collectives.values()])
    if not len(ready):
        return []
    begin = min([float(ready[0]), *runs[runs[:, 0] <= ready[0], 0]])
    return _consecutive(record.first_step + skipped, begin, _ends(ready, runs), ready)


def _of_call(call: Array, record: Record) -> list[Step]:
    """Return the steps of one call of the train function; all but the last one end with their collectives."""
    begin, end, first, last = float(call[0]), float(call[1]), int(call[2]), int(call[3])
    if last < first:
        return []
    ready = record.stamps[max(0, first - record.first_step):max(0, last + 1 - record.first_step), 0]
    if len(ready) != last + 1 - first:  # the steps ran long before the window
        return [Step(first, last, begin, end)]
    within = [runs[(runs[:, 0] >= begin) & (runs[:, 1] <= end)] for runs in record.collectives.values()]
    within = [runs for runs in within if len(runs)]
    if within and all(len(runs) == len(ready) for runs in within):
        ends = np.max([runs[:, 1] for runs in within], axis=0).tolist()  # each runs once per step
    else:
        ends = _ends(ready, np.concatenate([np.zeros((0, 2)), *within]))
    return _consecutive(first, begin, [*ends[:-1], end], ready)


def _consecutive(first: int, begin: float, ends: Sequence[float], ready: Array) -> list[Step]:
    # A busy rank may record `ready` late, but gradients are always ready before their collectives end.
    return [Step(first + index, first + index, since, until, min(float(moment), until))
            for index, (since, until, moment) in enumerate(zip([begin, *ends[:-1]], ends, ready, strict=True))]


def _ends(ready: Array, runs: Array) -> list[float]:
    """Return the end times of steps: the ends of their last collectives.

    The collectives between the gradients of two steps are split at their widest gap, in which the next step computes.
    """
    runs = runs[np.argsort(runs[:, 0])]
    reached = np.maximum.accumulate(np.concatenate([[-math.inf], runs[:, 1]]))
    indices = np.searchsorted(runs[:, 0], ready, side="right")
    ends = []
    for moment, later, since, until in zip(ready, [*ready[1:], math.inf], indices, [*indices[1:], len(runs)],
                                           strict=True):
        busy = np.maximum(reached[since:until + 1], moment)  # end of the busy time before each run, and after the last
        ends.append(float(busy[np.argmax(np.append(runs[since:until, 0], later) - busy)]))
    return ends


def events(record: Record, window: tuple[int, int] | None,
           outside: Iterable[tuple[Mapping[str, Any], float, float]] = ()) -> list[Event]:
    """Return the events of a window of steps, on the common clock.

    Args:
        record: Record of these steps and the surrounding ones.
        window: First step, and the one after the last; None for the full record.
        outside: Collectives outside of steps: content as in `Record.buckets`, start and end.

    Returns:
        Metadata events that name the rows, then complete events in order of time.
    """
    first, after = window or (0, sys.maxsize)
    everyone = _steps(record, first, after)
    wanted = [step for step in everyone if first <= step.last and step.index < after]
    since, until = -math.inf, math.inf
    if window is not None:
        if not wanted:
            return []
        before = [step.end for step in everyone if step.last < first]
        since, until = min(before[-1] if before else math.inf, wanted[0].begin), wanted[-1].end
    found: list[_Found] = [
        *((STEPS, _named(step.index, step.last), step.begin, step.end, {"step": step.index}) for step in wanted),
        *((INPUT, "input", begin, end, {}) for begin, end in _between(record.inputs, since, until)),
        *_calls(record.calls, first, after),
        *_computing(wanted, record.inputs),
        *((UPDATE, UPDATE, begin, end, {}) for begin, end in _between(record.updates, since, until)),
        *_collectives(record, wanted, since, until),
        *(_collective(content, begin, end) for content, begin, end in outside),
    ]
    labels = dict.fromkeys([*ROWS, *sorted((row for row, *_ in found if row not in ROWS), key=_natural)])
    rows = {row: index + 1 for index, row in enumerate(labels) if any(each[0] == row for each in found)}
    made = [{"name": name, "cat": "collective" if row not in ROWS else row, "ph": "X", "pid": record.rank,
             "tid": rows[row], "ts": round((begin + record.clock_offset) * 1e6, 3),
             "dur": round(max(0.0, end - begin) * 1e6, 3), "args": arguments}
            for row, name, begin, end, arguments in found]
    return [*_names(rows, record.rank), *sorted(made, key=lambda event: (event["ts"], event["tid"]))]


def _between(spans: Array, since: float, until: float) -> list[list[float]]:
    chosen: list[list[float]] = spans[(spans[:, 0] >= since) & (spans[:, 0] < until)].tolist()
    return chosen


def _names(rows: Mapping[str, int], rank: int) -> Iterator[Event]:
    for row, number in rows.items():
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": row}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _calls(calls: Array, first: int, after: int) -> Iterator[_Found]:
    for begin, end, start, last in calls:
        if first <= last and start < after:
            yield CALLS, f"train function, {_named(int(start), int(last))}", float(begin), float(end), {}


def _natural(label: str) -> list[tuple[int, str]]:  # sort key: part 2 before part 10
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", label)]


def _named(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _computing(steps: Sequence[Step], inputs: Array) -> Iterator[_Found]:
    """Yield the time from the start of each step, or the end of its input, until its gradients are ready."""
    for step in steps:
        if step.ready:
            waited = inputs[(inputs[:, 1] > step.begin) & (inputs[:, 1] <= step.ready), 1]
            begin = float(waited.max()) if len(waited) else step.begin
            yield COMPUTING, "gradients", begin, step.ready, {"step": step.index}


def _collectives(record: Record, steps: Sequence[Step], since: float, until: float) -> Iterator[_Found]:
    begins = [step.begin for step in steps]
    for key, runs in record.collectives.items():
        known = {"label": key, **record.buckets.get(key, {})}
        for began, ended in _between(runs, since, until):
            index = bisect.bisect_right(begins, began) - 1
            in_step = {"step": steps[index].index} if index >= 0 and began < steps[index].end else {}
            yield _collective(known, began, ended, **in_step)


def _collective(content: Mapping[str, Any], began: float, ended: float, **in_step: int) -> _Found:
    label = content["label"]
    return label, str(content.get("collective") or "collective"), began, ended, {
        "collective": label, "operation": content.get("operation"), "how": content.get("how"),
        "bytes": content.get("bytes"), **in_step}
