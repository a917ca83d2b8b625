"""Rounding errors of compressed gradients, by variable: state of training that commits and backups keep.

The engine keeps the errors of each host by the keys of its collectives, which belong to one membership and one plan.
They are freed with the optimizer whose gradients they are of, those of a tape with the variables, and all of them with
the session. Equal models have plans of their own, since their errors must not mix.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Sequence
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
    owner: Any = None  # weak reference to the object with which the errors end


class RestoredErrors(dict[Any, Any]):
    """Errors of variables, by their keys, that were restored before their gradients are reduced."""


class RoundingErrors:
    """Compressed buckets of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buckets: dict[str, _Bucket] = {}  # copied before it is iterated over: finalizers may change it
        self._numbers: dict[tuple[str, tuple[Any, ...]], int] = {}
        self._counters: dict[str, Any] = collections.defaultdict(itertools.count)

    def number(self, key: str, variables: Sequence[Any]) -> int:
        """Return the number of these variables among all with equal gradients, in the order of their first reduction.

        It is the same on all ranks, since it does not depend on when earlier variables were freed.

        Args:
            key: The key of the plan of equal gradients.
            variables: The variables, or the sources of a tape.
        """
        tracked = [_tracked(variable) for variable in variables]
        if not all(isinstance(variable, tf.Variable) for variable in tracked):
            return 0  # tensors are others in each step
        known = key, tuple(compat.variable_key(variable) for variable in tracked)
        if known not in self._numbers:
            self._numbers[known] = next(self._counters[key])
            _when_gone(tracked[0], self._numbers.pop, known, None)
        return self._numbers[known]

    def register(self, key: str, ranks: tuple[int, ...], variables: Sequence[Any], counts: Sequence[int],
                 optimizer: Any = None) -> None:
        """Register a bucket when its reduction is traced or about to run; it takes over restored errors.

        Args:
            key: The key of the collective.
            variables: The variables, or the sources of a tape.
            counts: Their numbers of elements.
            optimizer: The optimizer; None for a tape.
        """
        owner = _tracked(variables[0]) if optimizer is None else optimizer
        keys = tuple(compat.variable_key(variable) for variable in variables)
        known = self._buckets.get(key)
        if known is not None and known.variables == keys and known.owner is not None and known.owner() is owner:
            return
        is_tensor = optimizer is None and not isinstance(owner, tf.Variable)
        bucket = _Bucket(ranks, keys, (0, *np.cumsum(counts).tolist()), None if is_tensor else weakref.ref(owner))
        self._buckets[key] = bucket
        if not is_tensor:
            _when_gone(owner, _free, weakref.ref(self), key, bucket)
        pending = this_process().part(RestoredErrors)
        restored = [pending.pop(variable, None) for variable in keys]
        if any(errors is not None for errors in restored):
            self._set(key, bucket, restored)

    def close(self) -> None:
        """Forget the buckets when the session ends; the engine frees their errors when it stops."""
        self._buckets = {}

    def of(self, variables: Sequence[Any]) -> Errors:
        """Return this rank's errors of variables; None where it has none."""
        found: dict[Any, Any] = {}
        for key, bucket in self._buckets.copy().items():
            errors = self._backend.rounding_errors(key, bucket.ranks, bucket.starts[-1])
            if errors is not None:
                for index, variable in enumerate(bucket.variables):
                    part = errors[bucket.starts[index] : bucket.starts[index + 1]]
                    found[variable] = found[variable] + part if variable in found else part
        return [found.get(compat.variable_key(variable)) for variable in variables]

    def total(self, variables: Sequence[Any], process_set: ProcessSet) -> Errors:
        """Return the errors of all hosts; all ranks of a process set call this together."""
        buckets = self._buckets.copy()
        registered = {variable: bucket.starts[index + 1] - bucket.starts[index] for bucket in buckets.values()
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
        for key, bucket in self._buckets.copy().items():
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

    def free(self, key: str, bucket: _Bucket) -> None:
        """Free the errors of a bucket whose owner is gone, unless another one has taken them over. From any thread."""
        if self._buckets.get(key) is bucket:
            del self._buckets[key]
            if isinstance(self._session.backend, CompressesBetweenHosts):  # not in a forked process
                self._session.backend.set_rounding_errors(key, bucket.ranks, np.empty(0, np.float32))


def _tracked(variable: Any) -> Any:
    """Return the `tf.Variable` of a variable or of a source of a tape; or else the source."""
    return compat.as_tf_variable(getattr(variable, "source", variable))


def _free(errors: weakref.ref[RoundingErrors], key: str, bucket: _Bucket) -> None:
    known = errors()
    if known is not None:
        known.free(key, bucket)


def _when_gone(owner: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function when an object is collected, but not at the end of the process."""
    weakref.finalize(owner, function, *arguments).atexit = False


def rounding_errors() -> RoundingErrors | None:
    """Return the compressed buckets of the current session; None between sessions."""
    return current_session().part(RoundingErrors) if is_initialized() else None
