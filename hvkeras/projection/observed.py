"""The input of a projection, from the ranks' records: a job's buckets and its exposed communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvkeras.projection.model import Bucket
from hvkeras.records.record import GRADIENTS, Array, Record
from hvkeras.records.runs import matched, numbered

WARM_UP = 5  # first runs of each collective to skip (at most half of all)
SHORTEST = 1e-6  # minimum seconds of an allreduce, whatever the clocks say


@dataclass(frozen=True)
class Observed:
    """A job with several ranks on one host.

    Attributes:
        ranks: The number of ranks.
        buckets: The buckets of gradients that are reduced in each step, in order.
        exposed: Seconds of a step during which communication continues after all gradients are ready.
    """

    ranks: int
    buckets: tuple[Bucket, ...]
    exposed: float


def observed(records: Sequence[Record | None]) -> Observed | str:
    """Extracts the communication of a typical step.

    Args:
        records: The record of each rank, in rank order.

    Returns:
        The observed job, or why it cannot be used.
    """
    known = [record for record in records if record is not None]
    if len(known) < len(records):
        return "not all ranks left a record"
    if len({record.host for record in known}) > 1:
        return "it is measured within a host, and this job had several"
    if any(key.endswith(".values") for key in known[0].collectives):
        return "sparse gradients are gathered, which is not in the model"
    spans = {key: _spans(key, known) for key in _keys_of_steps(known)}
    spans = {key: runs for key, runs in spans.items() if len(runs)}
    if not spans:
        return "no allreduce of gradients was recorded"
    runs = min(map(len, spans.values()))
    spans = {key: each[-runs:][min(WARM_UP, runs // 2):] for key, each in spans.items()}
    order = sorted(spans, key=lambda key: float(np.median(spans[key][:, 0])))
    last = spans[order[-1]]
    buckets, before = [], np.full(len(last), -np.inf)
    for key in order:
        begins, ends = spans[key].T
        seconds = np.median(ends - np.maximum(begins, before))
        lead = np.median(last[:, 0] - begins)
        size = int(known[0].buckets[key]["bytes"])
        buckets.append(Bucket(size, max(float(lead), 0.0), max(float(seconds), SHORTEST)))
        before = np.maximum(before, ends)
    return Observed(len(known), tuple(buckets), max(float(np.median(before - last[:, 0])), 0.0))


def _keys_of_steps(records: Sequence[Record]) -> list[str]:
    """The buckets that every step reduces: those that ran at least half as often as the most frequent one."""
    first = records[0]
    sized = [key for key, bucket in first.buckets.items()
             if bucket["operation"] == GRADIENTS and bucket["bytes"]]
    keys = [key for key in sized if all(key in record.collectives for record in records)]
    most = max((len(first.collectives[key]) for key in keys), default=0)
    return [key for key in keys if 2 * len(first.collectives[key]) >= most]


def _spans(key: str, records: Sequence[Record]) -> Array:
    """When the last rank entered, and when the last rank left, each run that all ranks have recorded."""
    rows, _ = matched([numbered(record)[key] for record in records])
    found: Array = np.max(rows, axis=0)
    return found
