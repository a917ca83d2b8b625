"""Spans of several ranks compared: runs of collectives matched by their numbers, and the union of spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvkeras.diagnostics.record import Array, Record

Runs = tuple[Array, int]  # start and end of each run of a collective, and the index of the first of these runs


def numbered(record: Record) -> dict[str, Runs]:
    """The runs of the collectives in a record, by key."""
    return {key: (rows, record.first_runs.get(key, 0)) for key, rows in record.collectives.items()}


def matched(runs: Sequence[Runs]) -> tuple[list[Array], int]:
    """The runs of a collective that all ranks know.

    Args:
        runs: Those that each rank knows.

    Returns:
        The rows of these runs, rank by rank, and the index of the first one.
    """
    first = max(start for _, start in runs)
    last = max(first, min(start + len(rows) for rows, start in runs))
    return [rows[first - start : last - start] for rows, start in runs], first


def shortest(everyone: Sequence[Mapping[str, Runs]]) -> dict[str, Runs]:
    """The shortest time that any rank spent in each run of each collective.

    Args:
        everyone: The runs that each rank knows, by key.

    Returns:
        By key: the seconds of each run that all ranks of the collective know, and the index of the first of these runs.
    """
    found = {}
    for key in dict.fromkeys(key for runs in everyone for key in runs):
        known, first = matched([runs[key] for runs in everyone if key in runs])
        if len(known[0]):
            found[key] = np.min([rows @ (-1.0, 1.0) for rows in known], axis=0), first
    return found


class Cover:
    """The union of spans, and how much of an interval it covers."""

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
        """The mean time covered, in seconds, of the intervals from `begins` to `ends`."""
        if not len(self.spans):
            return 0.0
        total = np.concatenate([[0.0], np.cumsum(self.spans @ (-1.0, 1.0))])
        edges = self.spans.ravel()
        covered = np.column_stack([total[:-1], total[1:]]).ravel()
        return float(np.mean(np.interp(ends, edges, covered) - np.interp(begins, edges, covered)))
