"""Programs: the operations of a function, with those of the functions that it calls in place of the calls."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs


@dataclass(eq=False)
class Node:
    """An operation of a program.

    Args:
        operation: The operation of TensorFlow.
        inputs: Numbers of the tensors that it takes.
        outputs: Numbers of the tensors that it makes.
        after: Nodes that must run before it, beside those whose tensors it takes.
    """

    operation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    after: tuple[Node, ...]

    @property
    def type(self) -> str:
        """Type of the operation."""
        return str(self.operation.type)


@dataclass(eq=False)
class Program:
    """Operations in an order in which they can run.

    Args:
        graph: The graph of the function.
        inputs: Numbers of the tensors that it is given.
        outputs: Numbers of the tensors that it returns.
        nodes: The operations.
        tensors: The tensor of TensorFlow of each number.
        users: How many operations take each tensor; a result of the program counts as taken.
    """

    graph: Any
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    nodes: list[Node] = field(default_factory=list)
    tensors: list[tf.Tensor] = field(default_factory=list)
    users: list[int] = field(default_factory=list)

    def function(self, node: Node, attribute: str) -> Any:
        """Return the graph of a function that an operation calls, such as the body of a loop.

        Args:
            node: The operation.
            attribute: Name of the attribute that names the function.
        """
        return tensorflow_graphs.function_named(
            node.operation.graph, node.operation.node_def.attr[attribute].func.name)


def read(graph: Any) -> Program:
    """Read the graph of a function.

    Operations that contribute neither to a result nor to an effect are left out.

    Args:
        graph: The `FuncGraph` of the function.
    """
    reader = _Reader(graph)
    program = reader.program
    program.inputs = tuple(reader.number_of(tensor) for tensor in graph.inputs)
    numbers = dict(zip((tensor.name for tensor in graph.inputs), program.inputs, strict=True))
    program.outputs, _ = reader.add(graph, numbers, ())
    _combine_moments(program)
    _update_first(program)
    program.users = [0] * len(program.tensors)
    for taken in (*(node.inputs for node in program.nodes), program.outputs):
        for number in taken:
            program.users[number] += 1
    return program


class _Reader:
    """Adds graphs to a program."""

    def __init__(self, graph: Any) -> None:
        self.program = Program(graph)

    def number_of(self, tensor: tf.Tensor) -> int:
        """Return the number of a new tensor."""
        self.program.tensors.append(tensor)
        return len(self.program.tensors) - 1

    def add(self, graph: Any, numbers: dict[str, int], after: tuple[Node, ...]
            ) -> tuple[tuple[int, ...], tuple[Node, ...]]:
        """Add the operations of a graph.

        Args:
            graph: The graph.
            numbers: Numbers of its inputs, by name.
            after: Nodes that must run before.

        Returns:
            Numbers of its outputs, and the nodes that must have run when it has.
        """
        given = {tensor.op.name for tensor in graph.inputs}
        ends: dict[str, tuple[Node, ...]] = {}
        for operation in _in_order(graph):
            if operation.name in given:
                continue
            before = tuple(dict.fromkeys([*after, *(
                node for control in operation.control_inputs for node in ends.get(control.name, ()))]))
            inputs = tuple(numbers[tensor.name] for tensor in operation.inputs)
            called = tensorflow_graphs.called(graph, operation)
            if called is not None:
                outputs, ends[operation.name] = self.add(
                    called, dict(zip((tensor.name for tensor in called.inputs), inputs, strict=True)), before)
                numbers.update(zip((tensor.name for tensor in operation.outputs), outputs, strict=True))
                continue
            outputs = tuple(self.number_of(tensor) for tensor in operation.outputs)
            numbers.update(zip((tensor.name for tensor in operation.outputs), outputs, strict=True))
            node = Node(operation, inputs, outputs, before)
            self.program.nodes.append(node)
            ends[operation.name] = (node,)
        last = dict.fromkeys(node for name in _effects(graph) for node in ends.get(name, ()))
        return tuple(numbers[tensor.name] for tensor in graph.outputs), tuple(last)


def _effects(graph: Any) -> Iterator[str]:
    """Yield the names of operations that a function runs whether or not a result needs them."""
    for operation in graph.control_outputs:
        yield operation.name
    for operation in graph.get_operations():
        if operation.op_def is not None and operation.op_def.is_stateful and operation.type != "Placeholder":
            yield operation.name


def _in_order(graph: Any) -> list[Any]:
    """Return the operations that results and effects need, each behind those that it needs.

    A graph lists operations as they were made, but loops get inputs later.
    """
    waiting: list[Any] = [graph.get_operation_by_name(name) for name in _effects(graph)]
    waiting += [tensor.op for tensor in graph.outputs]
    needs: dict[str, set[str]] = {}
    while waiting:
        operation = waiting.pop()
        if operation.name not in needs:
            before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
            needs[operation.name] = {needed.name for needed in before}
            waiting += before
    users: dict[str, list[str]] = {name: [] for name in needs}
    for name, names in needs.items():
        for needed in names:
            users[needed].append(name)
    places = {operation.name: place for place, operation in enumerate(graph.get_operations())}
    ready = [places[name] for name, names in needs.items() if not names]
    heapq.heapify(ready)
    operations, ordered = graph.get_operations(), []
    while ready:
        operation = operations[heapq.heappop(ready)]
        ordered.append(operation)
        for user in users[operation.name]:
            needs[user].discard(operation.name)
            if not needs[user]:
                heapq.heappush(ready, places[user])
    return ordered


class Moments:
    """Two operations in one: the mean, and the variance, which the first of them precedes.

    Both are means of something along the same axes, with which they keep dimensions.
    """

    type = "Moments"

    def __init__(self, mean: Any, variance: Any) -> None:
        self.name: str = mean.name
        self.graph: Any = mean.graph
        self.inputs: Any = mean.inputs
        self.outputs: tuple[tf.Tensor, tf.Tensor] = (mean.outputs[0], variance.outputs[0])
        self.op_def: Any = mean.op_def
        self.traceback: Any = mean.traceback

    def create(self, operands: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return mean and variance, given what to take them of, and along which axes."""
        mean = tf.raw_ops.Mean(input=operands[0], axis=operands[1], keep_dims=True)
        difference = tf.math.squared_difference(operands[0], mean)
        return [mean, tf.raw_ops.Mean(input=difference, axis=operands[1], keep_dims=True)]


def _combine_moments(program: Program) -> None:
    """Let mean and variance be one operation, since all ranks' variance follows from each rank's mean and variance."""
    makers = {number: node for node in program.nodes for number in node.outputs}
    for node in list(program.nodes):
        difference = makers.get(node.inputs[0]) if _is_mean(node) else None
        if difference is None or difference.type != "SquaredDifference":
            continue
        mean = makers.get(difference.inputs[1])
        while mean is not None and mean.type in ("StopGradient", "Identity"):
            mean = makers.get(mean.inputs[0])
        if mean is None or not _is_mean(mean) or mean.inputs[0] != difference.inputs[0] or _axes(mean) is None or \
                _axes(mean) != _axes(node) or len(mean.outputs) > 1:
            continue
        mean.operation, mean.outputs = Moments(mean.operation, node.operation), mean.outputs + node.outputs
        program.nodes.remove(node)


def _update_first(program: Program) -> None:
    """Let updates that do not depend on a batch precede it: when there is none left, the function fails there.

    How far a function has come when it fails is chance, such as whether a generator of seeds has been advanced; all
    ranks, and one process in practice, have come as far as they can.
    """
    batches = [node for node in program.nodes if node.type in ("IteratorGetNext", "IteratorGetNextSync")]
    if not batches:
        return
    later, numbers = set(batches), {number for node in batches for number in node.outputs}
    for node in program.nodes:
        if node in later or not (numbers.isdisjoint(node.inputs) and later.isdisjoint(node.after)):
            later.add(node)
            numbers.update(node.outputs)
    first = [node for node in program.nodes if node not in later]
    updates = tuple(node for node in first if node.operation.op_def.is_stateful and node.type != "ReadVariableOp")
    program.nodes = [*first, *(node for node in program.nodes if node in later)]
    for node in batches:
        node.after = tuple(dict.fromkeys([*node.after, *updates]))


def _is_mean(node: Node) -> bool:
    return node.type == "Mean" and node.operation.get_attr("keep_dims")


def _axes(node: Node) -> list[int] | None:
    axes = node.operation.inputs[1]
    return tensorflow_graphs.constant(axes.op).ravel().tolist() if axes.op.type == "Const" else None
