"""State that a step changes: the ranks' changes are combined, so that all ranks have the state of one process.

In a step, Keras assigns to variables that do not train: states of metrics, moving statistics, states of random seeds.
The first assignment of a step to each variable is noted with the value before it. After the step, the ranks sum up what
they have added to the states of metrics. Other variables get the mean over all ranks, weighted by rows, which is
exact for moving averages of means over rows. One allreduce carries all of them, and the logs that are no metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Max, Min, Sum
from hvkeras.collectives.reductions import allreduce
from hvkeras.collectives.row_share import RowShare
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, explain
from hvkeras.global_batch.marks import Mark
from hvkeras.job.session import current_session
from hvkeras.training import metrics


class Changes:
    """Changes of variables in one step, except those by the update of reduced gradients, which are not combined.

    Args:
        optimizer: The optimizer of the model; None if it has none.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = compat.inner_optimizer(optimizer) or optimizer
        self._before: dict[int, tuple[Any, Any]] = {}  # by the variable's id: variable, value before the step
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.complete: set[int] = set()  # ids of variables whose changes come from all rows on every rank
        self.synchronized: set[int] = set()  # ids of variables that are equal on all ranks

    def note(self, variable: Any) -> None:
        """Note the value of a variable that is about to be assigned."""
        if variable.trainable or id(variable) in self._before:
            return
        if self._optimizer is not None and compat.is_summed(self._optimizer):
            return  # equal on all ranks, or this rank's part of a sharded update
        if self._graph is None:
            before = tf.identity(variable.value)
        else:
            with self._graph.as_default():  # in a branch, the value before it
                before = compat.as_tf_variable(variable).read_value()
        self._before[id(variable)] = variable, before

    def merge(self, model: Any, logs: Any, rows: RowShare, mark: Mark | None) -> Any:
        """Combine the changes of all ranks, and compare their batches.

        Args:
            logs: The result of the step on this rank.
            mark: The mark of the whole batch on this rank; None if ranks get parts of it.

        Returns:
            The logs of all rows.
        """
        rules = self._rules(model)
        self._reduce_extremes(rules, rows)
        sources = _Sources(model, self._before, logs)
        sums = _Sums(rows)
        for identity, (variable, before) in self._before.items():
            rule = rules.get(identity, "")
            if rule in ("sum", "first", "mean"):
                sums.add(rule, tf.convert_to_tensor(variable.value), variable.assign, before)
        values: dict[int, Any] = {}
        for index, value in sources.other_numbers().items():
            sums.add("mean", value, functools.partial(values.__setitem__, index))
        if mark is not None:
            sums.add("mark", mark.value, mark.compare)
        sums.reduce()
        return sources.logs(values)

    def _rules(self, model: Any) -> dict[int, str]:
        """Return how to combine each variable: `sum`, `mean`, `max`, `min`, `first`, or "" to leave it."""
        found: dict[int, str] = {}
        for metric in flat_metrics(model):
            for variable, rule in zip(metric.variables, _rules_of(metric), strict=True):
                found[id(variable)] = "" if id(variable) in self.complete else rule
        for identity, (variable, _) in self._before.items():
            if identity not in found:
                is_state = tf.as_dtype(variable.dtype).is_floating and identity not in self.synchronized
                found[identity] = "mean" if is_state else ""
        return found

    def _reduce_extremes(self, rules: dict[int, str], rows: RowShare) -> None:
        for rule, op in (("max", Max), ("min", Min)):
            for identity, (variable, before) in self._before.items():
                if rules.get(identity) == rule:
                    now = tf.where(rows.has_rows, variable.value, before)
                    variable.assign(allreduce(now, op=op, name=f"the {rule} of a metric"))


@dataclass(frozen=True)
class _Number:
    """A tensor to be combined from all ranks.

    Attributes:
        now: Its value on this rank.
        before: Its value before the step, equal on all ranks; None if it is not known.
        use: Takes the combined value.
    """

    now: Any
    before: Any
    use: Callable[[Any], Any]


class _Sums:
    """Numbers to combine from all ranks in one allreduce of float64 numbers; those of a kind and dtype are packed."""

    def __init__(self, rows: RowShare) -> None:
        self._rows = rows
        self._groups: dict[tuple[str, Any], list[_Number]] = {}

    def add(self, kind: str, now: Any, use: Callable[[Any], Any], before: Any = None) -> None:
        """Add a number.

        Args:
            kind: How to combine it: `sum` of the changes since `before`, `mean` weighted by rows, value of the `first`
                rank, or `mark`, the sum of the ranks' values.
            now: A tensor of any real dtype, this rank's value.
            use: Takes the combined value, of the same dtype and shape.
            before: The value before the step.
        """
        self._groups.setdefault((kind, now.dtype), []).append(_Number(now, before, use))

    def reduce(self) -> None:
        """Combine the numbers, and use the results."""
        if not self._groups:
            return
        own = [self._of_rank(kind, numbers) for (kind, _), numbers in self._groups.items()]
        summed = allreduce(tf.concat(own, 0), op=Sum, name="the states of a step")
        parts = tf.split(summed, [_length(one) for one in own])
        for ((kind, dtype), numbers), part in zip(self._groups.items(), parts, strict=True):
            total = _flat([number.before for number in numbers]) + part if kind == "sum" else part
            for number, value in zip(numbers, _unflat(tf.cast(total, dtype), numbers), strict=True):
                number.use(value)

    def _of_rank(self, kind: str, numbers: Sequence[_Number]) -> Any:
        """Return this rank's part of a group, a float64 vector."""
        now = _flat([number.now for number in numbers])
        if kind == "sum":
            return self._rows.counted(now - _flat([number.before for number in numbers]))
        if kind == "mean":
            return self._rows.times_share(self._rows.counted(now))
        return now * tf.cast(current_session().topology.rank == 0, tf.float64) if kind == "first" else now


def _flat(tensors: Sequence[Any]) -> Any:
    if all(tensor.shape.rank == 0 for tensor in tensors):
        return tf.cast(tf.stack(tensors), tf.float64)
    return tf.cast(tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0), tf.float64)


def _unflat(flat: Any, numbers: Sequence[_Number]) -> list[Any]:
    if all(number.now.shape.rank == 0 for number in numbers):
        return list(tf.unstack(flat, len(numbers)))
    parts = tf.split(flat, [_length(number.now) for number in numbers])
    return [tf.ensure_shape(tf.reshape(part, tf.shape(number.now)), number.now.shape)
            for number, part in zip(numbers, parts, strict=True)]


def _length(tensor: Any) -> Any:
    return tf.size(tensor) if tensor.shape.num_elements() is None else tensor.shape.num_elements()


def flat_metrics(model: Any) -> list[Any]:
    """Return the metrics of a model, each once."""
    found = {id(metric): metric for group in compat.metric_groups(model) for metric in group}
    return list(found.values())


def _rules_of(metric: Any) -> Sequence[str]:
    merging = ["sum"] * len(metric.variables) if is_undeclared(metric) else metrics.merging_of(metric)
    if callable(merging):
        raise UnsupportedError(explain("Metrics under --data-parallel are merged by rules, not by a method",
                                       'set hvkeras_merge to "sum", "max", "min", "mean" or a list of them',
                                       metric=type(metric).__name__))
    return list(merging)


def is_undeclared(metric: Any) -> bool:
    """Return whether a user's metric has variables of its own, and does not say how to merge them."""
    try:
        metrics.merging_of(metric)
    except metrics.UndeclaredMergeError:
        return True
    return False


class _Sources:
    """What the logs of a step are computed from: metrics, whose results change with their states, or other values."""

    def __init__(self, model: Any, changed: dict[int, tuple[Any, Any]], logs: Any) -> None:
        self._logs = logs
        self._flat = tf.nest.flatten(logs)
        self._metrics: dict[int, Any] = {}  # by the index of a log
        updated = [metric for metric in flat_metrics(model) if any(id(one) in changed for one in metric.variables)]
        for index, value in enumerate(self._flat):
            metric = _metric_of(value, updated)
            if metric is not None:
                self._metrics[index] = metric
        self._names = list(logs) if isinstance(logs, dict) else []

    def other_numbers(self) -> dict[int, Any]:
        """Return the numbers in the logs that are no results of metrics, by index."""
        return {index: value for index, value in enumerate(self._flat)
                if index not in self._metrics and isinstance(value, tf.Tensor) and value.shape.rank == 0
                and value.dtype.is_floating}

    def logs(self, averaged: dict[int, Any]) -> Any:
        """Return the logs of all ranks, given the averages of other numbers."""
        results: dict[int, Any] = {}
        flat = list(self._flat)
        for index, value in averaged.items():
            flat[index] = value
        for index, metric in self._metrics.items():
            if id(metric) not in results:
                results[id(metric)] = metric.result()
            result = results[id(metric)]
            if isinstance(result, dict):
                result = result.get(self._names[index] if len(self._names) == len(flat) else "", flat[index])
            flat[index] = result
        return tf.nest.pack_sequence_as(self._logs, flat)


def _metric_of(value: Any, candidates: Sequence[Any]) -> Any:
    """Return the metric whose result a value is; None if it is something else."""
    if not isinstance(value, tf.Tensor):
        return None
    if isinstance(value, tf.__internal__.EagerTensor):
        return next((metric for metric in candidates if _equals(metric.result(), value)), None)
    read = graphs.variables_read_by(value)
    if not read:
        return None
    owners = []
    for metric in candidates:
        handles = {id(graphs.handle_in_graph(compat.as_tf_variable(variable))) for variable in metric.variables}
        if read <= handles:
            owners.append((len(handles), metric))
    return min(owners, key=lambda owner: owner[0])[1] if owners else None


def _equals(result: Any, value: Any) -> bool:
    results = list(result.values()) if isinstance(result, dict) else [result]
    return any(isinstance(one, tf.Tensor) and one.dtype == value.dtype and one.shape == value.shape
               and bool(tf.reduce_all(tf.equal(one, value))) for one in results)
