"""Run a script of one process on the ranks of a job, each of which computes its part of every function of TensorFlow.

    hvkeras run -np 2 python partitioned.py 17 script.py ...

In one process, the script runs as it is. Each rank runs it in a folder of its own, with the same seed and data. What
TensorFlow would run, and takes or reads tensors with rows, is partitioned by `hvkeras.partition`; results are whole on
every rank. Beside its folder, each rank writes what was divided and gathered: `partitioned0.json`, ...
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import atomic_function

import hvkeras as hvd
from harness import seeded
from hvkeras.collectives.rounds import Rounds
from hvkeras.compat import patches
from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES

_SOURCES = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
AtomicFunction: Any = atomic_function.AtomicFunction


class Functions:
    """Partitioned functions, in place of those that TensorFlow has made."""

    def __init__(self) -> None:
        self._made: dict[bytes, Any] = {}  # None: a function that no rows come into
        self.reports: list[Any] = []
        self._original = AtomicFunction.call_flat

    def call(self, function: Any, *args: Any) -> Any:
        """Stand in for `AtomicFunction.call_flat`."""
        if not function._bound_context.executing_eagerly():
            return self._original(function, *args)
        if function.name not in self._made:
            self._made[function.name] = None  # functions that are called meanwhile are as they are
            self._made[function.name] = self._partitioned(function, args)
        made = self._made[function.name]
        if made is None:
            return self._original(function, *args)
        results = self._original(made._inference_function, *args, *made.captured_inputs)
        results = list(results) if isinstance(results, list | tuple) else [results]
        results = results[:len(function.graph.outputs)]
        for result, original in zip(results, function.graph.outputs, strict=True):
            tensorflow_graphs.copy_handle(original, result)
        return results

    def _partitioned(self, function: Any, args: Any) -> Any:
        graph = function.graph
        captured = len(function.function_type.captures or {})
        rows = _inputs_with_rows(args[:len(args) - captured], graph)
        if not rows and not any(node.op in _SOURCES for node in _nodes(graph)):
            return None
        partitioned = Partitioned(graph, {"rows": rows} if rows else {}, RULES)

        def run(*tensors: tf.Tensor) -> Any:
            for tensor, original in zip(tensors, graph.inputs, strict=True):
                tensorflow_graphs.copy_handle(original, tensor)
            results = partitioned.create([[tensor] for tensor in tensors], [hvd.rank()], hvd.size(), Rounds())
            return [tensor for tensor, in results]

        made = tf.function(run, autograph=False).get_concrete_function(*(
            tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in graph.inputs))
        self.reports.append(partitioned.report)
        return made


def _nodes(graph: Any) -> list[Any]:
    definition = graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def _inputs_with_rows(args: Any, graph: Any) -> list[int]:
    """Return the numbers of inputs with as many rows as the first that has any."""
    dense = [number for number, tensor in enumerate(args) if tensor.dtype not in (tf.resource, tf.variant)
             and tensor.shape.rank and graph.inputs[number].shape.rank]
    first = args[dense[0]].shape[0] if dense else 0
    return [number for number in dense if first and args[number].shape[0] == first]


def join() -> None:
    """Join the job for its collectives alone: what Keras does stays what it does in one process."""
    hvd.init()
    patches.uninstall_job()


def main() -> None:
    """Run the script."""
    join()
    folder = Path(f"rank{hvd.rank()}")
    folder.mkdir()
    os.chdir(folder)
    functions = Functions()
    if hvd.size() > 1:
        AtomicFunction.call_flat = lambda function, *args: functions.call(function, *args)  # noqa: PLW0108 - a method
    seeded.main()
    divided: Counter[str] = sum((Counter(report.divided) for report in functions.reports), Counter())
    Path(f"../partitioned{hvd.rank()}.json").write_text(json.dumps({
        "divided": divided, "digests": [report.digest for report in functions.reports],
        "gathered": [f"{each.type} {each.line} {each.operands}" for report in functions.reports
                     for each in report.gathered]}))
    hvd.shutdown()
    sys.stdout.flush()
    os._exit(0)  # exit handlers of TensorFlow have hung


if __name__ == "__main__":
    main()
