"""Marks of gradients: where a function of the whole batch hands gradients to an optimizer.

When the function is divided among the ranks (`hvkeras.global_batch`), each rank has a part of the sum of each gradient
there. These are reduced like those of a distributed optimizer: in buckets, while the backward pass goes on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.diagnostics.recorder import recording
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.job.session import this_process
from hvkeras.partition.decisions import Call, Decision, Value
from hvkeras.partition.emission import Exchange
from hvkeras.partition.layouts import REPLICATED, Partial
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rules.elementwise import identities

_MARK = "_hvkeras_gradients"


@dataclass(frozen=True)
class Marked:
    """Gradients that a function hands to an optimizer.

    Attributes:
        reducer: Reduces them.
        variables: Their variables.
        places: For each operand of the operation that marks them, the number of its gradient.
        may_be_partial: Whether the ranks may have parts of its sum.
        loss_scale: Returns the scale of their loss; None if it is not scaled.
    """

    reducer: GradientReducer
    variables: Sequence[Any]
    places: Sequence[int]
    may_be_partial: Sequence[bool]
    loss_scale: Callable[[], Any] | None

    def reduce(self, tensors: Sequence[Any], partial: Sequence[bool]) -> list[Any]:
        """Return the operands, of which partial ones are reduced."""
        results, gradients = list(tensors), [None] * len(self.variables)
        sent = [number for number, is_partial in enumerate(partial) if is_partial]
        for number in sent:
            gradients[self.places[number]] = tensors[number]
        if not sent:
            recording().step(tensors[:1], self.variables)
            return results
        reduced = (self.reducer.reduce(gradients, self.variables) if self.loss_scale is None
                   else self.reducer.reduce_scaled(gradients, self.variables, self.loss_scale))
        for number in sent:
            results[number] = reduced[self.places[number]]
        return results


class Marks:
    """Marked gradients of the functions of this process."""

    def __init__(self) -> None:
        self._marked: dict[int, Marked] = {}
        self._numbers = itertools.count(1)

    @graphs.without_autograph
    def mark(self, gradients: Sequence[Any], variables: Sequence[Any], reducer: GradientReducer,
             loss_scale: Callable[[], Any] | None = None) -> list[Any]:
        """Mark gradients in the function under construction.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None.
            variables: Their variables.
            reducer: Reduces them.
            loss_scale: Returns the scale of their loss; None if it is not scaled.

        Returns:
            The gradients.
        """
        recording().end_step()
        operands, places, may_be_partial = [], [], []
        for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            parts = [] if gradient is None else [gradient.values, gradient.indices] if isinstance(
                gradient, tf.IndexedSlices) else [tf.convert_to_tensor(gradient)]
            operands += parts
            places += [number] * len(parts)
            may_be_partial += [not place and part.dtype.is_floating and not compat.is_overwritten(variable)
                               for place, part in enumerate(parts)]
        if not operands:
            return list(gradients)
        number = next(self._numbers)
        weakref.finalize(graphs.function_graph(), self._marked.pop, number, None)
        self._marked[number] = Marked(reducer, variables, places, may_be_partial, loss_scale)
        made = iter(graphs.marked_identity(operands, _MARK, number))
        return [gradient if gradient is None else tf.IndexedSlices(next(made), next(made), gradient.dense_shape)
                if isinstance(gradient, tf.IndexedSlices) else next(made) for gradient in gradients]

    def rule(self, call: Call) -> Pattern | Decision | None:
        """Return how the ranks carry out an `IdentityN`; of marked gradients, they sum up their parts."""
        mark = call.operation.node_def.attr.get(_MARK)
        marked = None if mark is None else self._marked.get(mark.i)
        if marked is None:
            return identities(call)
        partial = [isinstance(value.layout, Partial) and value.layout.reduction == "sum" and may
                   for value, may in zip(call.operands, marked.may_be_partial, strict=True)]

        def create_together(emission: Any, operation: Any, given: Sequence[list[Any]]) -> list[list[Any]]:
            units, = emission.units
            tensors = [units.masked(tensor, value.layout.division) if is_partial and isinstance(value.layout, Partial)
                       else tensor for (tensor,), value, is_partial in zip(given, call.operands, partial, strict=True)]
            if any(partial):
                emission.rounds.append([Exchange("sum", tuple(
                    None if tensor.shape.num_elements() is None else tensor.shape.num_elements() * tensor.dtype.size
                    for tensor, is_partial in zip(tensors, partial, strict=True) if is_partial))])
            results = marked.reduce(tensors, partial)
            return [[tf.ensure_shape(result, output.shape)]
                    for result, output in zip(results, operation.outputs, strict=True)]

        return Decision(
            tuple(value.layout if is_partial else REPLICATED
                  for value, is_partial in zip(call.operands, partial, strict=True)),
            tuple(Value(REPLICATED, value.shape) for value in call.operands), create_together=create_together,
            communicates=any(partial))


def marks() -> Marks:
    """Return the marked gradients of this process."""
    return this_process().part(Marks)
