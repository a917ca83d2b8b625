"""Exact metrics: the states of all ranks are merged, and the result computed once from the whole.

An average of results is wrong for anything but means over equally many samples; states are sums
(totals and counts, confusion matrices), and sums add up. So before Keras turns the metrics of an
epoch or an evaluation into logs, each metric gets the merged state of all ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

Arrays = list[Any]  # one array a variable

_MERGES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": lambda values: np.sum([_wide(value) for value in values], axis=0),
    "mean": lambda values: np.mean([_wide(value) for value in values], axis=0),
    "max": lambda values: np.max(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
    "first": lambda values: values[0],
}
_AGGREGATIONS = {"mean": "mean", "only_first_replica": "first"}  # what Keras's own declaration means


@dataclass(frozen=True)
class State:
    """One metric of one rank.

    Attributes:
        kind: Its class's name.
        name: Its own name, for messages: automatic names differ between ranks.
        values: Its variables' values.
    """

    kind: str
    name: str
    values: Arrays

    def shape(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return (self.kind, *(np.shape(value) for value in self.values))


# What the last merge left in each model's metrics: variable, merged value, this rank's own value.
_merged: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any, Any]]] = weakref.WeakKeyDictionary()


def check(model: Any) -> None:
    """Makes sure that the state of each of the model's metrics can be merged.

    Raises:
        UsageError: A metric of the user's does not say how.
    """
    for metric in _flat(compat.metric_groups(model)):
        merging_of(metric)


def own_states(model: Any) -> list[list[State]]:
    """This rank's own state of all metrics, which they get back if the last merge is still in them."""
    forget_merged(model)
    return [[State(type(metric).__name__, metric.name, [np.asarray(variable) for variable in metric.variables])
             for metric in group] for group in compat.metric_groups(model)]


def merge(model: Any, process_set: ProcessSet, what: str, own: list[list[State]] | None) -> list[bool]:
    """Gives the model's metrics the states of all ranks together.

    Args:
        model: The model.
        process_set: The ranks that take part.
        what: What the metrics are of, for messages.
        own: This rank's states; None if it had no data.

    Returns:
        For each rank whether it had states; False for one without data.

    Raises:
        UsageError: A metric does not say how to merge, or ranks have other metrics.
    """
    check(model)
    everyone = [None if states is None else _flat(states)
                for states in allgather_object(own, name=f"the metrics of {what}", process_set=process_set)]
    there = [(rank, states) for rank, states in zip(process_set.ranks, everyone, strict=True) if states is not None]
    _require_same(there, what)
    kept = _merged[model] = []
    metrics = _flat(compat.metric_groups(model)) if own is not None else []
    for place, metric in enumerate(metrics):
        merged = merge_states(metric, [states[place].values for _, states in there])
        for variable, value in zip(metric.variables, merged, strict=True):
            mine = np.asarray(variable)
            variable.assign(np.asarray(value).astype(mine.dtype))
            kept.append((variable, np.asarray(variable), mine))
    return [states is not None for states in everyone]


def average_logs(logs: Any, process_set: ProcessSet, what: str) -> Any:
    """Averages logs that do not come from metrics: those that a `train_step` of the user's returned last.

    Args:
        logs: This rank's values by name.
        process_set: The ranks that take part.
        what: What the logs are of, for messages.

    Returns:
        The averages by name; values that are no numbers are this rank's.
    """
    if not isinstance(logs, dict):
        return logs
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    numbers = {name: value for name, value in numbers.items() if np.issubdtype(value.dtype, np.number)}
    return {**logs, **average(allgather_object(numbers, name=f"the logs of {what}", process_set=process_set))}


def average(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Averages several ranks' numbers by name, each over the ranks that have it."""
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    means = {name: np.mean([np.asarray(theirs[name], np.float64) for theirs in everyone if name in theirs], axis=0)
             for name in names}
    return {name: float(value) if value.ndim == 0 else value for name, value in means.items()}


def forget_merged(model: Any) -> None:
    """Gives metrics that were not reset since the last merge their own state back, so that it counts once."""
    for variable, merged, mine in _merged.pop(model, ()):
        if np.any(np.not_equal(merged, mine)) and np.array_equal(np.asarray(variable), merged, equal_nan=True):
            variable.assign(mine)


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    """A context after which the model's metrics are as they were before it."""
    merged = _merged.pop(model, None)
    before = [(variable, np.asarray(variable)) for metric in _flat(compat.metric_groups(model))
              for variable in metric.variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        if merged is not None:
            _merged[model] = merged


def merge_states(metric: Any, states: Sequence[Arrays]) -> Arrays:
    """Merges the states of several ranks.

    Args:
        metric: The metric, which says how.
        states: Each rank's values, one array a variable.

    Returns:
        The merged values.

    Raises:
        UsageError: The metric does not say how.
    """
    how = merging_of(metric)
    if callable(how):
        return list(how([list(values) for values in states]))
    return [_MERGES[way](values) for way, values in zip(how, zip(*states, strict=True), strict=True)]


def merging_of(metric: Any) -> Any:
    """How a metric's state is merged: a function, or a way for each variable.

    The states of Keras's own metrics are sums. A metric of the user's that has variables of its own
    says it by an attribute or method `hvkeras_merge`, or by the `aggregation` of its variables.

    Raises:
        UsageError: It does not say.
    """
    declared = getattr(metric, "hvkeras_merge", None)
    count = len(metric.variables)
    if callable(declared):
        return declared
    if declared is not None:
        ways = [declared] * count if isinstance(declared, str) else declared
        if not isinstance(ways, (list, tuple)) or len(ways) != count or not all(way in _MERGES for way in ways):
            raise UsageError(explain(f"hvkeras_merge must be one of {', '.join(_MERGES)}, or a list of them with one"
                                     " for each variable, or a method", metric=type(metric).__name__,
                                     hvkeras_merge=declared, variables=count))
        return ways
    aggregations = [compat.aggregation_of(variable) for variable in metric.variables]
    if any(aggregation in _AGGREGATIONS for aggregation in aggregations):
        return [_AGGREGATIONS.get(aggregation, "sum") for aggregation in aggregations]
    if _has_state_of_its_own(type(metric)):
        raise UsageError(explain(
            f"The metric {type(metric).__name__} must say how the states of several ranks are merged",
            f'set {type(metric).__name__}.hvkeras_merge = "sum" if its variables are sums and counts, else "max",'
            ' "min", "mean", a list with one of these for each variable, or a method that merges a list of states',
            variables=[variable.name for variable in metric.variables]))
    return ["sum"] * count


def _has_state_of_its_own(cls: type) -> bool:
    """Whether a user's class adds variables to those of Keras's class that it derives from."""
    own = [base for base in cls.__mro__ if not compat.is_of_keras(base)]
    nearest = next(base for base in cls.__mro__ if compat.is_of_keras(base))
    if own and nearest.__name__ == "Metric":
        return True
    return any(adder in function.__code__.co_names for base in own for function in vars(base).values()
               if hasattr(function, "__code__") for adder in ("add_variable", "add_weight"))


def _require_same(there: Sequence[tuple[int, list[State]]], what: str) -> None:
    for rank, states in there[1:]:
        first_rank, first = there[0]
        for one, other in zip(first, states, strict=False):
            if one.shape() != other.shape():
                raise UsageError(explain(f"All ranks must have the same metrics in {what}", "compile the model alike on"
                                         " every rank", **{f"rank_{first_rank}": _described(one),
                                                           f"rank_{rank}": _described(other)}))
        if len(first) != len(states):
            raise UsageError(explain(f"All ranks must have the same metrics in {what}",
                                     "compile the model alike on every rank",
                                     **{f"rank_{first_rank}": [state.name for state in first],
                                        f"rank_{rank}": [state.name for state in states]}))


def _described(state: State) -> str:
    return f"{state.name} ({state.kind} {[list(np.shape(value)) for value in state.values]})"


def _flat(groups: list[list[Any]]) -> list[Any]:
    return [one for group in groups for one in group]


def _wide(value: Any) -> Any:
    """Sums of float32 states are made in float64, so that they do not depend on the number of ranks."""
    return value.astype(np.float64) if np.issubdtype(value.dtype, np.floating) else value
