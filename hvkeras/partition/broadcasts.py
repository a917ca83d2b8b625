"""Copies that need not be made: of tensors that are repeated only to meet others, element by element.

The gradient of a mean is copied to the shape of what the mean was taken of, divided by a number, and multiplied by a
tensor of that shape. Dividing what is not copied yet, and leaving the rest to the product, which broadcasts, computes
the same elements. In a batch normalization this saves four of about twelve passes over the images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras.partition.decisions import Decision, Value
from hvkeras.partition.layouts import REPLICATED, Divided, Layout, Replicated
from hvkeras.partition.programs import Node, Program
from hvkeras.partition.sizes import Shape

_COPIES = ("BroadcastTo", "Tile")
_OF_ONE = ("Cast", "Identity", "Neg", "StopGradient")
_OF_TWO = ("Add", "AddV2", "Div", "DivNoNan", "Mul", "RealDiv", "Sub")


def leave_out_copies(program: Program, values: list[Value], decisions: list[Decision]) -> None:
    """Let what repeats a tensor return it as it is, where everything that takes the result broadcasts.

    Args:
        program: The program.
        values: What is known of each tensor; changed.
        decisions: The decision of each node; changed.
    """
    _Copies(program, values, decisions).leave_out()


class _Copies:
    def __init__(self, program: Program, values: list[Value], decisions: list[Decision]) -> None:
        self._nodes: list[Node] = program.nodes
        self._values, self._decisions = values, decisions
        self._small: dict[int, Shape] = {}  # shapes of results that might be made without the copies
        self._kept: set[int] = set(program.outputs)

    def leave_out(self) -> None:
        if not any(node.type in _COPIES for node in self._nodes):
            return
        for node, decision in self._steps():
            shape = self._small_shape(node, decision)
            if shape is not None:
                self._small[node.outputs[0]] = shape
        for node, decision in reversed(list(self._steps())):  # what takes a result is known before the result
            if not self._accepts(node, decision):
                self._kept.update(number for operand, number in enumerate(node.inputs) if decision.takes(operand))
        for node, _ in self._steps():
            if node.type not in _COPIES and not self._kept.isdisjoint(self._small.keys() & set(node.inputs)):
                self._kept.update(node.outputs)  # what is made of kept copies
        for place, node in enumerate(self._nodes):
            self._change(place, node)

    def _steps(self) -> Iterator[tuple[Node, Decision]]:
        return zip(self._nodes, self._decisions, strict=True)

    def _small_shape(self, node: Node, decision: Decision) -> Shape | None:
        """Return the shape that the result of a node has without copies; None if that is the one that it has."""
        if len(node.outputs) != 1 or decision.create is not None or decision.create_together is not None:
            return None
        values = [self._values[number] for number in node.inputs]
        if not all(isinstance(layout, Divided | Replicated)
                   for layout in (*decision.operands, self._values[node.outputs[0]].layout)):
            return None
        if node.type in _COPIES:
            shape, whole = values[0].shape, self._values[node.outputs[0]].shape
            if shape is None or whole is None or len(shape) != len(whole) or None in whole or shape == whole:
                return None
            layout = decision.operands[0]
            is_copied = [size == 1 != known for size, known in zip(shape, whole, strict=True)]
            if isinstance(layout, Divided) and is_copied[layout.axis]:
                return None
            return shape if all(copied or size == known for copied, size, known in zip(
                is_copied, shape, whole, strict=True)) else None
        small = [self._small.get(number) for number in node.inputs]
        if node.type in _OF_ONE:
            return small[0]
        if node.type in _OF_TWO and small.count(None) == 1:
            other = small.index(None)
            shape, number = small[1 - other], values[other].shape
            is_number = number is not None and shape is not None and len(number) <= len(shape) and set(number) <= {1}
            return shape if is_number and decision.operands[other] == REPLICATED else None
        return None

    def _accepts(self, node: Node, decision: Decision) -> bool:
        """Return whether a node computes the same, given operands without copies."""
        if len(node.outputs) != 1 or decision.create is not None or decision.create_together is not None:
            return False
        result = node.outputs[0]
        if result in self._small and node.type not in _COPIES:
            return result not in self._kept
        value = self._values[result]
        return (node.type in (*_OF_TWO, "AddN") and value.shape is not None and None not in value.shape and
                isinstance(value.layout, Divided | Replicated) and any(
                    self._values[number].shape == value.shape for number in node.inputs if number not in self._small))

    def _change(self, place: int, node: Node) -> None:
        decision = self._decisions[place]
        is_small = bool(node.outputs) and node.outputs[0] in self._small and node.outputs[0] not in self._kept
        small = [operand for operand, number in enumerate(node.inputs)
                 if number in self._small and number not in self._kept]
        if not is_small and not small:
            return
        operands = tuple(_layout(layout, self._small[node.inputs[operand]]) if operand in small else layout
                         for operand, layout in enumerate(decision.operands))
        decision = replace(decision, operands=operands)
        if is_small:
            number = node.outputs[0]
            value, shape = self._values[number], self._small[number]
            self._values[number] = replace(value, shape=shape, layout=_layout(value.layout, shape))
            if node.type in _COPIES:
                decision = replace(decision, create=_as_it_is)
                self._values[number] = replace(self._values[number], layout=decision.operands[0])
            decision = replace(decision, results=(self._values[number],))
        if node.type == "AddN":
            decision = replace(decision, create=_sum_around(small))
        self._decisions[place] = decision


def _layout(layout: Layout, shape: Shape) -> Layout:
    """Return the layout of a tensor without copies: whole, if it had been divided along an axis of copies."""
    return REPLICATED if isinstance(layout, Divided) and shape[layout.axis] == 1 else layout


def _as_it_is(_operation: Any, operands: Sequence[tf.Tensor], _sizes: Any) -> list[tf.Tensor]:
    return [operands[0]]


def _sum_around(small: Collection[int]) -> Any:
    def create(_operation: Any, operands: Sequence[tf.Tensor], _sizes: Any) -> list[tf.Tensor]:
        result = tf.add_n([tensor for operand, tensor in enumerate(operands) if operand not in small])
        for operand in small:
            result += operands[operand]
        return [result]
    return create
