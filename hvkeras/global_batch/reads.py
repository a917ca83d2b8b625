"""Batches that a divided function reads from an iterator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvkeras.collectives.global_batch import global_batch
from hvkeras.compat import graphs
from hvkeras.global_batch.iterators import Batches as Known
from hvkeras.global_batch.iterators import iterators
from hvkeras.global_batch.marks import mark_of
from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Rule, computed_by_all
from hvkeras.partition.rules.sources import Batches, common_groups, reading

_GETS, _GETS_OPTIONAL = ("IteratorGetNext", "IteratorGetNextSync"), "IteratorGetNextAsOptional"


@dataclass(frozen=True)
class _Element:
    """Types and shapes of the tensors of a batch."""

    types: tuple[tf.DType, ...]
    shapes: tuple[tf.TensorShape, ...]

    @property
    def attributes(self) -> dict[str, Any]:
        """As attributes of an operation."""
        return {"output_types": list(self.types), "output_shapes": list(self.shapes)}


def _element_of(node: Any) -> _Element:
    attributes = node.attr
    return _Element(tuple(map(tf.as_dtype, attributes["output_types"].list.type)),
                    tuple(map(tf.TensorShape, attributes["output_shapes"].list.shape)))


@dataclass(frozen=True)
class Batch:
    """How a function gets its next batch.

    Attributes:
        key: Distinguishes ways that need functions of their own.
        element: The tensors of a batch, as the original function reads them.
        fed: The batch itself, if the function does not read it.
        groups: Groups of tensors with the same rows, if the batch is fed.
        cut: An iterator of this rank's rows, in place of the original one; None if there is none.
        cut_element: What it returns.
        place: The number of the function's input that is the iterator.
    """

    key: Any
    element: _Element | None
    fed: Sequence[Any] = ()
    groups: tuple[str | None, ...] = ()
    cut: Any = None
    cut_element: _Element | None = None
    place: int = 0

    def with_iterator(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors for the function, given those for the original one."""
        if self.cut is not None:
            tensors[self.place] = graphs.handle_of_iterator(self.cut)
        return tensors

    @property
    def specs(self) -> list[Any]:
        """Types and shapes of what is fed."""
        if not self.fed or self.element is None:
            return []
        return [tf.TensorSpec(*pair) for pair in zip(self.element.shapes, self.element.types, strict=True)]

    def rules(self, fed: Sequence[Any]) -> dict[str, Rule]:
        """Return the rules of operations that read the batch.

        Args:
            fed: The batch in the graph under construction, if it is fed.
        """
        rule = reading(lambda operation: self._batches(operation, fed))
        found: dict[str, Rule] = {**dict.fromkeys(_GETS, rule), "OptionalGetValue": rule}
        return found if self.cut_element is None else {**found, _GETS_OPTIONAL: self._optional}

    def _batches(self, operation: Any, fed: Sequence[Any]) -> Batches:
        if operation.type == "OptionalGetValue" and self.element != _element_of(operation.node_def):
            return Batches((None,) * len(operation.outputs), _copied)
        if self.groups:
            return Batches(self.groups, lambda *_: _noted(list(fed)))
        shapes = [tuple(shape) if shape.rank else None for shape in map(_shape, operation.outputs)]
        if self.cut_element is None:
            return Batches(tuple(common_groups(shapes)), lambda *call: _noted(_copied(*call)[0]))
        return Batches(("",) * len(shapes), self._read_cut, are_cut=True)

    def _read_cut(self, operation: Any, operands: Sequence[Any]) -> Any:
        assert self.cut_element is not None
        attributes = self.cut_element.attributes
        if operation.type == "OptionalGetValue":
            *rows, total, mark = tf.raw_ops.OptionalGetValue(optional=operands[0], **attributes)
        else:
            *rows, total, mark = tf.raw_ops.IteratorGetNext(iterator=operands[0], **attributes)
        global_batch().note(mark)
        return rows, {"": total}

    def _optional(self, call: Call) -> Decision:
        """What may be the next batch of all ranks is this rank's rows of it."""
        def create(_: Any, operands: Sequence[Any], __: Any) -> list[Any]:
            return [tf.raw_ops.IteratorGetNextAsOptional(iterator=operands[0], **attributes)]

        assert self.cut_element is not None
        attributes = self.cut_element.attributes
        return replace(computed_by_all(call, [()]), create=create)


def _shape(tensor: Any) -> tf.TensorShape:
    return tf.TensorShape(None) if tensor.dtype in (tf.variant, tf.resource) else tensor.shape


def _copied(operation: Any, operands: Sequence[Any]) -> Any:
    return list(tensorflow_graphs.copied(operation, operands).outputs), {}


def _noted(batch: list[Any]) -> Any:
    global_batch().note(mark_of(batch))
    return batch, {}


class Reads:
    """Operations of a graph that read batches.

    Batches of which each rank needs its rows only are cut early, where this is provably the same. If it is not known
    whether all tensors of a batch have the same rows, the batch is fed to the function, so that its shapes are known.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Any) -> None:
        definition = graph.as_graph_def()
        outer, inner = list(definition.node), [node for one in definition.library.function for node in one.node_def]
        reads = [node for node in (*outer, *inner) if node.op in (*_GETS, _GETS_OPTIONAL)]
        self.are_any: bool = bool(reads)
        self.are_in_data: bool = any(node.op == "ReduceDataset" for node in (*outer, *inner))
        elements = set(map(_element_of, reads))
        self._element = elements.pop() if len(elements) == 1 else None
        is_read_once = len(reads) == 1 and reads[0].op in _GETS
        self._can_be_fed = is_read_once and any(node.op in _GETS for node in outer)
        self._can_be_cut = not any(
            node.op == "OptionalFromValue" and self._element is not None and tuple(
                map(tf.as_dtype, node.attr["Toutput_types"].list.type)) == self._element.types
            for node in (*outer, *inner))
        places = {tensor.name: place for place, tensor in enumerate(graph.inputs)}
        self._read = [places[name] for name in {
            tensor.name for operation in graph.get_operations()
            if operation.type in (*_GETS, _GETS_OPTIONAL) for tensor in operation.inputs} & places.keys()]
        self._others = [place for place, tensor in enumerate(graph.inputs) if place not in self._read
                        and tensor.dtype == tf.resource and tensorflow_graphs.handle(tensor) is None]
        self._batches: dict[Any, Batch] = {}

    def next(self, args: Sequence[Any]) -> Batch:
        """Return how the function gets its next batch.

        Args:
            args: The inputs of the function.

        Raises:
            tf.errors.OutOfRangeError: There is none, and it would be fed.
        """
        known = self._read + [place for place in self._others if iterators().know(args[place])]
        if len(known) != 1 or self._element is None:
            return self._batch("whole")
        place, = known
        found = iterators().batches(args[place])
        if found.cut is not None and self._can_be_cut:
            return self._batch("cut", place, found)
        if (found.have_common_rows and found.cut is None) or not self._can_be_fed:
            return self._batch("whole")
        fed = found.next() if found.cut is not None else tf.raw_ops.IteratorGetNext(
            iterator=args[place], **self._element.attributes)
        groups = _groups(fed)
        return Batch(("fed", groups), self._element, fed, groups)

    def _batch(self, how: str, place: int = 0, batches: Known | None = None) -> Batch:
        """Return how the function gets batches that are not fed."""
        element = () if batches is None else batches.element
        if (how, element) not in self._batches:
            cut = _Element(tuple(spec.dtype for spec in element), tuple(spec.shape for spec in element))
            self._batches[how, element] = Batch(f"{how} {len(self._batches)}", self._element, place=place,
                                                cut_element=cut if element else None)
        found = self._batches[how, element]
        return found if batches is None else replace(found, cut=batches.cut)


def _groups(tensors: Sequence[Any]) -> tuple[str | None, ...]:
    """Return names for the groups of tensors with the same number of rows."""
    numbers = [int(tensor.shape[0]) if tensor.dtype not in (tf.variant, tf.resource) and tensor.shape.rank else None
               for tensor in tensors]
    names = {number: str(name) for name, number in enumerate(dict.fromkeys(
        number for number in numbers if number is not None))}
    return tuple(None if number is None else names[number] for number in numbers)
