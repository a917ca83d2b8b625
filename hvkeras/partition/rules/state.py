"""Variables, checks, and what has effects outside of a graph.

A variable is the same on all ranks: they assign the whole value. Operations without a rule here are given whole
operands, as all others. What has effects outside of the graph runs on all ranks or on rank 0, as the caller says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Value, computed_by_all
from hvkeras.partition.layouts import REPLICATED, Partial
from hvkeras.partition.rule_table import rule
from hvkeras.partition.sizes import Shape

EFFECTS = (
    "CloseSummary", "CreateSummary", "DatasetToTFRecord", "FlushSummary", "ImportEvent", "PyFuncStateless", "Queue",
    "Reader", "SaveDataset", "Write",
)
"""Beginnings of types that have effects outside of the graph although they take a resource, or have no state."""

LOCAL = frozenset(("Assert", "CheckNumerics", "CheckNumericsV2", "DeviceIndex", "Empty", "StatelessRandomGetAlg"))
"""Types that TensorFlow calls stateful although they have no effects outside of the graph."""


@rule("ReadVariableOp")
def read(call: Call) -> Decision:
    """All ranks read the same."""
    known = tensorflow_graphs.handle(call.operation.inputs[0])
    shape = None if known is None or known[1].rank is None else tuple(known[1].as_list())
    return Decision((REPLICATED,), (Value(REPLICATED, shape),))


@rule("Assert")
def check(call: Call) -> Decision:
    """The condition is that of all rows; if it is false, a rank shows its own."""
    shown = [REPLICATED if isinstance(value.layout, Partial) else value.layout for value in call.operands[1:]]
    return Decision((REPLICATED, *shown), ())


def has_effect(operation: Any) -> bool:
    """Return whether an operation acts on something outside of the graph, which ranks may share.

    Each rank has resources (variables, iterators, tables) and random numbers (of operations with seeds) of its own.
    """
    if operation.type.startswith(EFFECTS):
        return True
    has_resources = any(tensor.dtype in (tf.resource, tf.variant) for tensor in (*operation.inputs, *operation.outputs))
    return operation.op_def.is_stateful and operation.type not in LOCAL and not has_resources and \
        "seed2" not in operation.node_def.attr


def effects_on_first(call: Call) -> Decision | None:
    """Rank 0 alone carries out what has effects."""
    return on_first(call) if has_effect(call.operation) else None


def on_first(call: Call, shapes: Sequence[Shape | None] | None = None) -> Decision:
    """Return the decision that rank 0 carries out an operation, and sends all the results, whose shapes only it knows.

    Args:
        call: The operation.
        shapes: What is known of the shapes of the results when functions are made.
    """
    def create_together(emission: Any, operation: Any, given: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        sent: list[list[tf.Tensor]] = [[] for _ in range(2 * len(operation.outputs))]
        for place, units in enumerate(emission.units):
            if units.rank == 0:
                made = tensorflow_graphs.copied(operation, [operand[place] for operand in given]).outputs
                own = [(tf.reshape(tensor, [-1]), tf.shape(tensor)) for tensor in made]
            else:
                own = [(tf.zeros([0], output.dtype), tf.zeros([0], tf.int32)) for output in operation.outputs]
            for number, (elements, shape) in enumerate(own):
                sent[2 * number].append(tf.cast(elements, tf.int32) if elements.dtype.is_bool else elements)
                sent[2 * number + 1].append(shape)
        received = emission.exchange("gather", sent) if sent else []
        return [[tf.ensure_shape(tf.reshape(tf.cast(tensor, output.dtype), shape), output.shape)
                 for tensor, shape in zip(received[2 * number], received[2 * number + 1], strict=True)]
                for number, output in enumerate(operation.outputs)]

    return replace(computed_by_all(call, shapes), create_together=create_together,
                   communicates=bool(call.operation.outputs))
