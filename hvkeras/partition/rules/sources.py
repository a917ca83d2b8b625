"""Batches that a function reads itself: their rows are divided where they come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Value, computed_by_all
from hvkeras.partition.layouts import REPLICATED, Divided, Division
from hvkeras.partition.rule_table import rule
from hvkeras.partition.sizes import Shape, Size, rows
from hvkeras.partition.units import common_number

_UNEQUAL = (
    "The tensors of a batch whose first dimension is not known must have as many rows. Received: rows={}. "
    "HINT: give those that have other rows a known first dimension, by tf.ensure_shape in dataset.map.")


@rule("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
def next_batch(call: Call) -> Decision:
    """Those parts of a batch have its rows whose first dimension is not known, or, if all are, that of the first part.

    Each rank has the whole batch.
    """
    operation = call.operation
    shapes: list[Shape | None] = [
        None if output.dtype in (tf.variant, tf.resource) or output.shape.rank is None else tuple(output.shape)
        for output in operation.outputs]
    first = [shape[0] for shape in shapes if shape]
    if not first:
        return computed_by_all(call, shapes)
    static = None if None in first else first[0]
    total: Size = rows(call.name) if static is None else static
    division = Division(call.name, total)
    has_rows = [shape is not None and shape[:1] == (static,) for shape in shapes]
    results = tuple(
        Value(Divided(division, 0), (total, *shape[1:])) if has and shape else Value(REPLICATED, shape)
        for has, shape in zip(has_rows, shapes, strict=True))

    def create_together(emission: Any, operation: Any, given: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        batch = tensorflow_graphs.copied(operation, [operand[0] for operand in given]).outputs
        number = common_number([tensor for tensor, has in zip(batch, has_rows, strict=True) if has], _UNEQUAL)
        for units in emission.units:
            units.set_total(division.name, number)
        return [[units.take(tensor, value, division, copies=True) if isinstance(value.layout, Divided) else tensor
                 for units in emission.units] for tensor, value in zip(batch, results, strict=True)]

    return Decision((REPLICATED,) * len(call.operands), results, create_together=create_together)
