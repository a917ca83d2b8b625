"""Functions of TensorFlow that several ranks carry out together, in the place of those that one process would call.

All ranks run the same script on the same data. Wherever a function is called eagerly (a step of Keras, a `tf.function`
of the user, a function of a saved model), its graph is divided among the ranks by `hvkeras.partition`. Its results are
whole on every rank, and those of one process.

Rows enter where the function reads a batch from an iterator, and by its arguments: those that have as many elements
along their first dimension as the first argument with more than one. Any choice is right; another one would gather
more. What is called while a function runs, in other threads, in forked processes, by hvkeras itself, and by a gradient
tape outside of any function is computed by every rank.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import tensorflow as tf

from hvkeras.collectives.broadcasts import gather_objects
from hvkeras.collectives.global_batch import global_batch
from hvkeras.collectives.rounds import Rounds
from hvkeras.compat import graphs
from hvkeras.errors import UsageError, explain
from hvkeras.global_batch.marks import mark_of
from hvkeras.global_batch.reads import Batch, Reads
from hvkeras.global_batch.reports import reports
from hvkeras.gradients.marks import marks
from hvkeras.job.process_sets import global_process_set
from hvkeras.job.session import current_session, this_process
from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Decision, computed_by_all
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES
from hvkeras.training.fit_hooks import running_calls

Run: TypeAlias = Callable[[Callable[..., Any], Sequence[Any]], Sequence[Any]]
"""Takes what calls a function of TensorFlow, and the tensors to call it on."""



class Functions:
    """Functions that this process has divided among the ranks."""

    def __init__(self) -> None:
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._is_running = False
        self._functions: dict[Any, Function | None] = {}  # by name; None for those that every rank computes

    @property
    def are_here(self) -> bool:
        """Whether this is the thread that trains, in a process that is a rank."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def call(self, original: Callable[..., Any], function: Any, *args: Any) -> Any:
        """Call a function of TensorFlow.

        Args:
            original: Calls it on this rank alone.
            function: The function.
            *args: Its tensors.
        """
        if self._is_running or not tf.executing_eagerly() or not self.are_here:
            return original(function, *args)
        if function.name not in self._functions:
            self._functions[function.name] = self._new(original, function)
        found = self._functions[function.name]
        if found is None or running_calls().alone:
            return original(function, *args)
        self._is_running = True
        try:
            with graphs.outside_of_xla():
                return found.call(original, function, args)
        finally:
            self._is_running = False

    def _new(self, original: Callable[..., Any], function: Any) -> Function | None:
        if graphs.is_part_of_gradient(function) or _is_called_by_hvkeras():
            return None
        weakref.finalize(function, self._functions.pop, function.name, None)
        with graphs.outside_of_xla():
            found = Function(original, function)
        if found.loops_in_data and not found.may_have_rows:
            reports().say_once(f"the loop over a dataset in {found.name} runs in tf.data: every rank computes all of"
                               " it. To divide it, call a @tf.function for each batch, or loop over iter(dataset)")
        return found if found.may_have_rows else None


def functions() -> Functions:
    """Return the functions of this process."""
    return this_process().part(Functions)


_SKIPPED = ("tensorflow.", "hvkeras.compat.adapters", __name__, "contextlib")


def _is_called_by_hvkeras() -> bool:
    """Return whether hvkeras itself has called a function of TensorFlow."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_SKIPPED):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("hvkeras.")


class Function:
    """A function of TensorFlow, divided anew for each way in which its arguments can have common rows.

    Args:
        original: Calls a function of TensorFlow.
        function: The function.
    """

    def __init__(self, original: Callable[..., Any], function: Any) -> None:
        self._graph = _graph_that_calls(original, function) if graphs.compiles(function) else function.graph
        self.name: str = re.sub(r"^__inference_(.*)_\d+$", r"\1", tf.compat.as_str(function.name))
        self._given = len(self._graph.inputs) - graphs.captures_of(function)
        self._reads = Reads(self._graph)
        self._divided: dict[Any, Run | None] = {}
        self.loops_in_data: bool = self._reads.are_in_data
        self.may_have_rows: bool = self._reads.are_any or any(map(_may_have_rows, self._graph.inputs[:self._given]))

    def call(self, original: Callable[..., Any], function: Any, args: Sequence[Any]) -> Any:
        """Call the function on all ranks together; see `Functions.call`."""
        batch, tensors = None, list(args)
        if self._reads.are_any:
            try:
                batch = self._reads.next(args)
            except tf.errors.OutOfRangeError:
                return original(function, *args)  # which fails like this, after other effects
            tensors = [*batch.with_iterator(tensors), *batch.fed]
        groups = _groups(args[:self._given], self._graph.inputs)
        key = groups, None if batch is None else batch.key
        if key not in self._divided:
            self._divided[key] = self._divide(groups, batch)
        run = self._divided[key]
        if run is None:
            return original(function, *args)
        if not self._graph.outputs:
            return run(original, tensors)
        results = list(run(original, tensors))[:len(self._graph.outputs)]
        for result, output in zip(results, self._graph.outputs, strict=True):
            tensorflow_graphs.copy_handle(output, result)
        return results

    def _divide(self, groups: Sequence[int], batch: Batch | None) -> Run | None:
        """Divide the function among the ranks; None if each computes all of it anyway."""
        sources: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            if group:
                sources.setdefault(f"rows{group}", []).append(number)
        fed: list[Any] = []
        rules = {**RULES, "IdentityN": marks().rule, "Timestamp": _timestamp}
        if batch is not None:
            rules |= batch.rules(fed)
        partitioned = Partitioned(self._graph, sources, rules)
        _require_same_function(self.name, partitioned.report.digest)
        if not partitioned.report.divided and not (batch is not None and batch.fed):
            return None
        topology, rounds = current_session().topology, Rounds()

        def run(*tensors: Any) -> list[Any]:
            inputs, fed[:] = tensors[:len(self._graph.inputs)], tensors[len(self._graph.inputs):]
            for tensor, original in zip(inputs, self._graph.inputs, strict=True):
                tensorflow_graphs.copy_handle(original, tensor)
            if sources:
                global_batch().note(mark_of([inputs[number] for numbers in sources.values() for number in numbers]))
            lanes = [[tensor] for tensor in inputs]
            return [tensor for tensor, in partitioned.create(lanes, [topology.rank], topology.size, rounds)]

        run.__name__ = re.sub(r"\W", "_", self.name)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self._graph.inputs]
        made = tf.function(run, autograph=False).get_concrete_function(
            *specs, *([] if batch is None else batch.specs))
        reports().add(self.name, partitioned.report, rounds.are_compiled)
        return graphs.called_by(made)


def _graph_that_calls(original: Callable[..., Any], function: Any) -> Any:
    """Return the graph of a function that calls one which XLA compiles."""
    def call(*tensors: Any) -> Any:
        for tensor, inner in zip(tensors, function.graph.inputs, strict=True):
            tensorflow_graphs.copy_handle(inner, tensor)
        return list(original(function, *tensors))

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in function.graph.inputs]
    return tf.function(call, autograph=False).get_concrete_function(*specs).graph


def _may_have_rows(tensor: Any) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant) and bool(tensor.shape.rank)


def _groups(tensors: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the group of each tensor, of those with the same number of rows; 0 for one that counts as without.

    The first group is that of the first tensor with more than one row. Others count where the function has been traced
    for any number of rows.
    """
    numbers = [int(tensor.shape[0]) if _may_have_rows(given) and tensor.shape.rank else 0
               for tensor, given in zip(tensors, inputs, strict=False)]
    first = next((number for number in numbers if number > 1), max(numbers, default=0))
    found = {first: 1} if first else {}
    for number, given in zip(numbers, inputs, strict=False):
        if number > 1 and given.shape[0] is None:
            found.setdefault(number, len(found) + 1)
    return tuple(found.get(number, 0) for number in numbers)


def _timestamp(call: Any) -> Decision:
    """Each rank has a clock of its own; nothing waits for it."""
    return replace(computed_by_all(call, [()]), create=lambda *_: [graphs.now()])


def _require_same_function(name: str, digest: str) -> None:
    """Check that all ranks divide the same function.

    Raises:
        UsageError: They do not.
    """
    everyone = gather_objects((name, digest), global_process_set, "the functions of ranks")
    differing = [rank for rank, found in enumerate(everyone) if found != everyone[0]]
    if differing:
        raise UsageError(explain(
            "All ranks must call the same functions of TensorFlow, since each computes a part of them", "remove what"
            " depends on the rank, the host or the time from the script, or seed it", functions=sorted(
                {found for found, _ in everyone}), ranks=differing))
