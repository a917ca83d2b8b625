"""Batches that a function reads itself: their rows are divided where they come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Rule, Value, computed_by_all
from hvkeras.partition.layouts import REPLICATED, Divided, Division
from hvkeras.partition.rule_table import rule
from hvkeras.partition.sizes import Shape, Size, rows
from hvkeras.partition.units import common_number

_UNEQUAL = (
    "The tensors of a batch whose first dimension is not known must have as many rows. Received: rows={}. "
    "HINT: give those that have other rows a known first dimension, by tf.ensure_shape in dataset.map.")


Read: TypeAlias = Callable[[Any, Sequence[tf.Tensor]], "tuple[Sequence[tf.Tensor], Mapping[str, tf.Tensor]]"]
"""A function of an operation and its operands; returns the tensors, and the number of rows, of each group."""


@dataclass(frozen=True)
class Batches:
    """How a function gets batches, if not by the operation of its graph.

    Args:
        groups: Names of the groups of tensors that have the same rows, for each tensor; None for one that has none.
        read: Creates what reads the batch: a function of the operation and its operands, which returns the tensors of
            the batch, and the number of rows of each group.
        are_cut: Whether each rank is given its own rows only.
    """

    groups: tuple[str | None, ...]
    read: Read
    are_cut: bool = False


def reading(batches: Callable[[Any], Batches | None]) -> Rule:
    """Return the rule of operations that get a batch.

    Args:
        batches: Returns how a function gets the batches of an operation; None: by the operation, each rank the whole.
    """
    return lambda call: _next_batch(call, batches(call.operation))


@rule("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
def next_batch(call: Call) -> Decision:
    """Those parts of a batch have its rows whose first dimension is not known, or, if all are, that of the first part.

    Each rank has the whole batch.
    """
    return _next_batch(call, None)


def _next_batch(call: Call, batches: Batches | None) -> Decision:
    operation = call.operation
    shapes: list[Shape | None] = [
        None if output.dtype in (tf.variant, tf.resource) or output.shape.rank is None else tuple(output.shape)
        for output in operation.outputs]
    groups = common_groups(shapes) if batches is None else batches.groups
    divisions: dict[str, Division] = {}
    for group, shape in zip(groups, shapes, strict=True):
        if group is not None and shape and (group not in divisions or shape[0] is not None):
            name = f"{call.name}{group and f'.{group}'}"
            divisions[group] = Division(name, rows(name) if shape[0] is None else shape[0])
    if not divisions and batches is None:
        return computed_by_all(call, shapes)
    results = tuple(_value(None if group is None else divisions[group], shape)
                    for group, shape in zip(groups, shapes, strict=True))

    def create_together(emission: Any, operation: Any, given: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        operands = [operand[0] for operand in given]
        batch, numbers = (_read if batches is None else batches.read)(operation, operands)
        for group, division in divisions.items():
            number = numbers[group] if group in numbers else common_number(
                [tensor for tensor, its_group in zip(batch, groups, strict=True) if its_group == group], _UNEQUAL)
            for units in emission.units:
                units.set_total(division.name, number)
        is_cut = batches is not None and batches.are_cut
        return [[units.take(tensor, value, value.layout.division, copies=True)
                 if isinstance(value.layout, Divided) and not is_cut else tensor for units in emission.units]
                for tensor, value in zip(batch, results, strict=True)]

    return Decision((REPLICATED,) * len(call.operands), results, create_together=create_together)


def common_groups(shapes: Sequence[Shape | None]) -> list[str | None]:
    """Return the only group of the tensors of a batch: see `next_batch`."""
    first = [shape[0] for shape in shapes if shape]
    static = None if None in first or not first else first[0]
    return ["" if shape and shape[0] == static else None for shape in shapes]


def _value(division: Division | None, shape: Shape | None) -> Value:
    if division is None or not shape:
        return Value(REPLICATED, shape)
    total: Size = division.total
    return Value(Divided(division, 0), (total, *shape[1:]))


def _read(operation: Any, operands: Sequence[tf.Tensor]) -> tuple[Sequence[tf.Tensor], Mapping[str, tf.Tensor]]:
    return list(tensorflow_graphs.copied(operation, operands).outputs), {}
