"""Rounding errors of compressed gradients, by variable: state of training that commits and backups keep.

The engine keeps the errors of each host by the keys of its collectives, which belong to one membership and one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.backends.capabilities import CompressesBetweenHosts
from hvkeras.collectives.operations import Sum
from hvkeras.collectives.reductions import grouped_allreduce
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import Session, current_session, is_initialized, this_process

Errors = list[Any]  # a flat float32 array for each variable, or None


@dataclass(frozen=True)
class _Bucket:
    ranks: tuple[int, ...]
    variables: tuple[Any, ...]  # their keys
    starts: tuple[int, ...]  # of each variable's elements, and the end


class RestoredErrors(dict[Any, Any]):
    """Errors of variables, by their keys, that were restored before their gradients are reduced."""


class RoundingErrors:
    """Compressed buckets of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buckets: dict[str, _Bucket] = {}

    def register(self, key: str, ranks: tuple[int, ...], variables: Sequence[Any], counts: Sequence[int]) -> None:
        """Register a bucket when its reduction is traced or about to run; it takes over restored errors.

        Args:
            key: The key of the collective.
            variables: The keys of the variables, `compat.variable_key`.
            counts: Their numbers of elements.
        """
        bucket = _Bucket(ranks, tuple(variables), (0, *np.cumsum(counts).tolist()))
        self._buckets[key] = bucket
        pending = this_process().part(RestoredErrors)
        restored = [pending.pop(variable, None) for variable in variables]
        if any(errors is not None for errors in restored):
            self._set(key, bucket, restored)

    def of(self, variables: Sequence[Any]) -> Errors:
        """Return this rank's errors of variables; None where it has none."""
        found: dict[Any, Any] = {}
        for key, bucket in self._buckets.items():
            errors = self._backend.rounding_errors(key, bucket.ranks, bucket.starts[-1])
            if errors is not None:
                for index, variable in enumerate(bucket.variables):
                    part = errors[bucket.starts[index] : bucket.starts[index + 1]]
                    found[variable] = found[variable] + part if variable in found else part
        return [found.get(compat.variable_key(variable)) for variable in variables]

    def total(self, variables: Sequence[Any], process_set: ProcessSet) -> Errors:
        """Return the errors of all hosts; all ranks of a process set call this together."""
        registered = {variable: bucket.starts[index + 1] - bucket.starts[index] for bucket in self._buckets.values()
                      for index, variable in enumerate(bucket.variables)}
        keys = [compat.variable_key(variable) for variable in variables]
        indices = [index for index, key in enumerate(keys) if key in registered]
        totals: Errors = [None] * len(keys)
        if indices:
            own = self.of(variables)
            sent = [tf.zeros([registered[keys[index]]]) if own[index] is None else tf.constant(own[index])
                    for index in indices]
            summed = grouped_allreduce(sent, op=Sum, process_set=process_set, name="the rounding errors")
            for index, errors in zip(indices, summed, strict=True):
                totals[index] = np.asarray(errors)
        return totals

    def restore(self, variables: Sequence[Any], errors: Errors) -> None:
        """Set this rank's errors of variables, now or when their buckets are registered."""
        restored = {compat.variable_key(variable): one for variable, one in zip(variables, errors, strict=True)}
        for key, bucket in self._buckets.items():
            if any(variable in restored for variable in bucket.variables):
                self._set(key, bucket, [restored.pop(variable, None) for variable in bucket.variables])
        this_process().part(RestoredErrors).update((key, one) for key, one in restored.items() if one is not None)

    @property
    def _backend(self) -> CompressesBetweenHosts:
        backend = self._session.backend
        assert isinstance(backend, CompressesBetweenHosts), "the reducer rejects other backends"
        return backend

    def _set(self, key: str, bucket: _Bucket, errors: Errors) -> None:
        counts = np.diff(bucket.starts)
        parts = [np.zeros(count, np.float32) if one is None else one for one, count in zip(errors, counts, strict=True)]
        self._backend.set_rounding_errors(key, bucket.ranks, np.concatenate(parts))


def rounding_errors() -> RoundingErrors | None:
    """Return the compressed buckets of the current session; None between sessions."""
    return current_session().part(RoundingErrors) if is_initialized() else None
