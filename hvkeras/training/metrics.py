"""Exact metrics: merge the states of all ranks, and compute the result from the merged state.

Averages of results are wrong for anything but means over equally many samples. States, however, are sums (totals and
counts, confusion matrices), which can be added. So before Keras computes the logs of an epoch or an evaluation, each
metric gets the merged state of all ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object, gather_objects
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

Arrays = list[Any]  # one array per variable

_MERGES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": lambda values: np.sum([_wide(value) for value in values], axis=0),
    "mean": lambda values: np.mean([_wide(value) for value in values], axis=0),
    "max": lambda values: np.max(values, axis=0),
    "min": lambda values: np.min(values, axis=0),
    "first": lambda values: values[0],
}
_AGGREGATIONS = {"mean": "mean", "only_first_replica": "first"}  # the merge for each of Keras's aggregations


class UndeclaredMergeError(UsageError):
    """A user's metric with variables of its own does not declare how to merge them."""


@dataclass(frozen=True)
class MetricState:
    """State of one metric on one rank.

    Attributes:
        name: Its name, for messages: automatic names differ between ranks.
    """

    kind: str
    name: str
    values: Arrays

    def shape(self) -> tuple[Any, ...]:
        """Return the class and shapes, which must be equal on all ranks."""
        return (self.kind, *(np.shape(value) for value in self.values))


# For each model, the variables of metrics that hold merged values: variable, merged value, value of this rank.
_merged: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any, Any]]] = weakref.WeakKeyDictionary()


def check(model: Any) -> None:
    """Check that the state of each of the model's metrics can be merged.

    Raises:
        UsageError: A user-defined metric does not declare how to merge its state.
    """
    for metric in _flat(compat.metric_groups(model)):
        merging_of(metric)


def own_states(model: Any) -> list[list[MetricState]]:
    """Return this rank's state of all metrics, restored in metrics that hold merged values."""
    forget_merged(model)
    return [[MetricState(type(metric).__name__, metric.name, [np.asarray(variable) for variable in metric.variables])
             for metric in group] for group in compat.metric_groups(model)]


def missing_call_hint(function: str) -> str:
    """Return the hint for messages about a rank that waits alone in a function of Keras."""
    return f"all ranks must call {function}; put what only one rank does into `with hvd.alone():`"


def merge(model: Any, process_set: ProcessSet, what: str, own: list[list[MetricState]] | None) -> list[bool]:
    """Replace the state of the model's metrics with the merged state of all ranks.

    Args:
        what: The call that the metrics belong to, for messages.
        own: This rank's states; None if it had no data.

    Returns:
        One value per rank: False for a rank without data.

    Raises:
        UsageError: A metric does not declare how to merge, or ranks have different metrics.
    """
    check(model)
    everyone = [None if states is None else _flat(states)
                for states in gather_objects(own, process_set, f"the metrics of {what}",
                                             missing_call_hint(what) if what == "evaluate" else "")]
    present = [(rank, states) for rank, states in zip(process_set.ranks, everyone, strict=True) if states is not None]
    _require_same_metrics(present, what)
    restorable = _merged[model] = []
    metrics = _flat(compat.metric_groups(model)) if own is not None else []
    for index, metric in enumerate(metrics):
        merged = merge_states(metric, [states[index].values for _, states in present])
        for variable, value in zip(metric.variables, merged, strict=True):
            mine = np.asarray(variable)
            variable.assign(np.asarray(value).astype(mine.dtype))
            restorable.append((variable, np.asarray(variable), mine))
    return [states is not None for states in everyone]


def average_logs(logs: Any, process_set: ProcessSet, what: str) -> Any:
    """Average logs that do not come from metrics: the last result of a user-defined `train_step`.

    Args:
        what: The call that the logs belong to, for messages.

    Returns:
        The averages by name; non-numeric values are this rank's.
    """
    if not isinstance(logs, dict):
        return logs
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    numbers = {name: value for name, value in numbers.items() if np.issubdtype(value.dtype, np.number)}
    return {**logs, **average(allgather_object(numbers, name=f"the logs of {what}", process_set=process_set))}


def average(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average the numbers of several ranks by name, each over the ranks that have it."""
    names = dict.fromkeys(name for logs in everyone for name in logs)
    means = {name: np.mean([np.asarray(logs[name], np.float64) for logs in everyone if name in logs], axis=0)
             for name in names}
    return {name: float(value) if value.ndim == 0 else value for name, value in means.items()}


def forget_merged(model: Any) -> None:
    """Restore this rank's state in metrics that were not reset since the last merge, so that it counts once."""
    for variable, merged, mine in _merged.pop(model, ()):
        if np.any(np.not_equal(merged, mine)) and np.array_equal(np.asarray(variable), merged, equal_nan=True):
            variable.assign(mine)


@contextlib.contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Enter a scope that restores the model's metrics at its end."""
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
    """Merge the states of several ranks.

    Args:
        metric: The metric, which declares how to merge.
        states: The values of each rank, one array per variable.

    Returns:
        The merged values.

    Raises:
        UsageError: The metric does not declare how to merge.
    """
    merging = merging_of(metric)
    if callable(merging):
        return list(merging([list(values) for values in states]))
    return [_MERGES[rule](values) for rule, values in zip(merging, zip(*states, strict=True), strict=True)]


def merging_of(metric: Any) -> Any:
    """Return how to merge a metric's state: a function, or the rule for each variable.

    The states of Keras's own metrics are sums. A user-defined metric with additional variables declares the merge by an
    attribute or method `hvkeras_merge`, or by the `aggregation` of its variables.

    Raises:
        UsageError: The metric does not declare a valid merge.
    """
    declared = getattr(metric, "hvkeras_merge", None)
    count = len(metric.variables)
    if callable(declared):
        return declared
    if declared is not None:
        rules = [declared] * count if isinstance(declared, str) else declared
        if not isinstance(rules, (list, tuple)) or len(rules) != count or not all(rule in _MERGES for rule in rules):
            raise UsageError(explain(f"hvkeras_merge must be one of {', '.join(_MERGES)}, or a list of them with one"
                                     " for each variable, or a method", metric=type(metric).__name__,
                                     hvkeras_merge=declared, variables=count))
        return rules
    aggregations = [compat.aggregation_of(variable) for variable in metric.variables]
    if any(aggregation in _AGGREGATIONS for aggregation in aggregations):
        return [_AGGREGATIONS.get(aggregation, "sum") for aggregation in aggregations]
    if _adds_variables(type(metric)):
        raise UndeclaredMergeError(explain(
            f"The metric {type(metric).__name__} must declare how the states of several ranks are merged",
            f'set {type(metric).__name__}.hvkeras_merge = "sum" if its variables are sums and counts, else "max",'
            ' "min", "mean", a list with one of these for each variable, or a method that merges a list of states',
            variables=[variable.name for variable in metric.variables]))
    return ["sum"] * count


def _adds_variables(cls: type) -> bool:
    """Return whether a user-defined class adds variables to those of its Keras base class."""
    own = [base for base in cls.__mro__ if not compat.is_of_keras(base)]
    nearest = next(base for base in cls.__mro__ if compat.is_of_keras(base))
    if own and nearest.__name__ == "Metric":
        return True
    return any(method in function.__code__.co_names for base in own for function in vars(base).values()
               if hasattr(function, "__code__") for method in ("add_variable", "add_weight"))


def _require_same_metrics(present: Sequence[tuple[int, list[MetricState]]], what: str) -> None:
    for rank, states in present[1:]:
        first_rank, first = present[0]
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


def _described(state: MetricState) -> str:
    return f"{state.name} ({state.kind} {[list(np.shape(value)) for value in state.values]})"


def _flat(groups: list[list[Any]]) -> list[Any]:
    return [one for group in groups for one in group]


def _wide(value: Any) -> Any:
    # Sums in float64 do not depend on the number of ranks.
    return value.astype(np.float64) if np.issubdtype(value.dtype, np.floating) else value
