"""Numbers that callbacks add to the logs of an epoch, such as a score over the data of their rank."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.host.console import some_of
from hvkeras.job.process_sets import ProcessSet

_TOLERANCE = 1e-5  # relative; every rank may have computed the same number


class AddedLogs:
    """Comparison of the numbers that callbacks add to the logs.

    Args:
        told: The names that need not be compared any more, and whether their numbers differ; extended in place.
    """

    def __init__(self, process_set: ProcessSet, told: dict[str, bool]) -> None:
        self._process_set, self._told = process_set, told
        self._mine: dict[str, float] = {}

    def mark(self, logs: Any, exact: Collection[str]) -> int:
        """Return a number of 24 bits that identifies the numbers of this rank.

        Args:
            logs: The logs of an epoch, after all callbacks.
            exact: The names of logs that cover the data of all ranks.
        """
        found = ((name, as_number(value)) for name, value in (logs or {}).items())
        self._mine = {name: float(value) for name, value in found
                      if value is not None and name not in exact and name not in self._told}
        return zlib.crc32(repr(sorted(self._mine.items())).encode()) >> 8 if self._mine else 0

    def differences(self) -> list[str]:
        """Return a line for each number that differs between ranks, once; all ranks must call this.

        A number that only one rank has is right: it may cover all data.
        """
        everyone = allgather_object(self._mine, name="the logs that callbacks add", process_set=self._process_set)
        lines = []
        for name in sorted({name for found in everyone for name in found}):
            by_rank = {rank: found[name] for rank, found in zip(self._process_set.ranks, everyone, strict=True)
                       if name in found}
            values = list(by_rank.values())
            differ = not np.allclose(values, values[0], _TOLERANCE, 0, equal_nan=True)
            if differ:
                lines.append(_line(name, by_rank))
            if differ or len(by_rank) < len(everyone):
                self._told[name] = differ
        return lines


def as_number(value: Any) -> float | int | None:
    """Return the value as a Python number; None for booleans, arrays and other non-numbers."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _line(name: str, by_rank: dict[int, float]) -> str:
    values: Sequence[str] = [f"{value:.6g} on rank {rank}" for rank, value in by_rank.items()]
    return (f"a callback adds {name!r} to the logs, with a number of its own on each rank: {some_of(values)}. Histories"
            " differ, callbacks that monitor it decide by the number of their rank, and all ranks stop when one of them"
            " wants to\nHINT: for the mean over all ranks, place hvd.callbacks.MetricAverageCallback() behind that"
            " callback, and before those that monitor it")
