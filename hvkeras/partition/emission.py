"""Emission: creates the operations of a plan in the current graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.analysis import Plan
from hvkeras.partition.collectives import Collectives, Lanes
from hvkeras.partition.decisions import Decision, Value, own_shape, static_shape
from hvkeras.partition.layouts import REPLICATED, Divided, Layout, ListOf, Partial, is_resolved, whole
from hvkeras.partition.programs import Node
from hvkeras.partition.sizes import Size, product
from hvkeras.partition.units import Units


@dataclass(frozen=True)
class Exchange:
    """What travels together, by one kind of collective.

    Args:
        kind: "sum", "max", "min", "gather", or "first".
        nbytes: Bytes of each tensor, of all ranks together where parts are gathered; None where they are not known.
    """

    kind: str
    nbytes: tuple[Size | None, ...]


class Emission:
    """Creates the operations of plans.

    Args:
        units: Units of each rank whose function is created here, the first of which is rank 0 or the only one.
        collectives: The collectives.
    """

    def __init__(self, units: Sequence[Units], collectives: Collectives) -> None:
        self.units: tuple[Units, ...] = tuple(units)
        self._collectives = collectives
        self.rounds: list[list[Exchange]] = []
        self._functions: dict[Any, Any] = {}
        self.compiles_collectives: bool = collectives.are_compiled
        self.is_compiled: bool = False
        self.compiles_each: bool = False

    def compiled(self, each: bool) -> Emission:
        """Return an emission of a function that XLA compiles.

        Args:
            each: Whether it cannot compile all of it, but only what TensorFlow's kernels do otherwise, or not at all.
        """
        found = copy.copy(self)
        found.is_compiled, found.compiles_each = True, each
        return found

    def run(self, plan: Plan, inputs: Sequence[Lanes]) -> list[Lanes]:
        """Create the operations of a plan.

        Args:
            plan: The plan.
            inputs: The inputs of each rank.

        Returns:
            The results of each rank.
        """
        return Run(self, plan, inputs).run()

    def exchange(self, kind: str, tensors: Sequence[Lanes], nbytes: Sequence[Size | None] | None = None,
                 together: bool = False) -> list[Lanes]:
        """Return the results of a collective.

        Args:
            kind: "sum", "max" or "min" of the ranks' tensors, "gather" their parts, or take those of the "first" rank.
            tensors: The tensors.
            nbytes: Their bytes, as far as they are known; None: those of shapes that TensorFlow knows.
            together: Whether this travels with the previous exchange.
        """
        if not together:
            self.rounds.append([])
        self.rounds[-1].append(Exchange(kind, tuple(nbytes or (_nbytes(lanes[0]) for lanes in tensors))))
        if kind in ("gather", "first"):
            return (self._collectives.gather if kind == "gather" else self._collectives.of_first)(tensors)
        return self._collectives.reduce(kind, tensors)

    def call(self, function: Callable[..., Any], tensors: Sequence[tf.Tensor], *options: Any) -> Any:
        """Return the results of a function whose graph is made once, and then called wherever it is needed.

        Args:
            function: A function of tensors and options.
            tensors: The tensors.
            options: The options.
        """
        key = function, tuple((tensor.dtype, tensor.shape.rank) for tensor in tensors), options
        if key not in self._functions:
            with tf.init_scope():
                self._functions[key] = tf.function(
                    lambda *given: function(*given, *options), autograph=False).get_concrete_function(*(
                        tf.TensorSpec(None if tensor.shape.rank is None else [None] * tensor.shape.rank, tensor.dtype)
                        for tensor in tensors))
        return self._functions[key](*tensors)


_OTHERWISE_COMPILED = ("Conv", "DepthwiseConv", "Random", "Stateless", "TruncatedNormal")
"""Operations that XLA carries out with other results than TensorFlow's kernels, or where they cannot."""

_Needed: TypeAlias = "tuple[int, Layout]"  # a tensor in a layout


class Run:
    """Creates the operations of one plan.

    A tensor is of level 0 if no collective precedes it; what a collective returns is one level higher than the tensors
    of its round. All collectives that tensors of a level need are one round. Those on whose results no other one
    depends, such as losses and metrics, wait for a last round, which does not hold up the backward pass.

    Args:
        emission: The emission.
        plan: The plan.
        inputs: The inputs of each rank.
    """

    def __init__(self, emission: Emission, plan: Plan, inputs: Sequence[Lanes]) -> None:
        self.emission, self.plan = emission, plan
        self._tensors: dict[int, Lanes] = dict(zip(plan.program.inputs, inputs, strict=True))
        self._converted: dict[_Needed, Lanes] = {}
        self._created: dict[Node, list[list[Any]]] = {}  # operations of each rank
        self._levels: list[int] = [0] * len(plan.values)
        self._late: set[int] = set()

    def run(self) -> list[Lanes]:
        """Create the operations; return the results."""
        plan, nodes = self.plan, self.plan.program.nodes
        live = plan.live
        levels, requests = self._schedule(live)
        of_level: list[list[int]] = [[] for _ in requests]
        for place, level in enumerate(levels):
            if live[place]:
                of_level[level].append(place)
        for places, resolved in zip(of_level, requests, strict=True):
            for place in places:
                self._create(nodes[place], plan.decisions[place])
            with tf.control_dependencies(self._before_last() if self._late.intersection(resolved) else []):
                self._resolve(resolved)
        return [self._in_layout(number, layout)
                for number, layout in zip(plan.program.outputs, plan.outputs, strict=True)]

    def made(self, number: int) -> Lanes:
        """Return a tensor in the layout in which it was made."""
        return self._tensors[number]

    def whole(self, number: int) -> Lanes:
        """Return a tensor whole."""
        layout = self.plan.values[number].layout
        if is_resolved(layout, whole(layout)) and (number, whole(layout)) not in self._converted:
            self._resolve([number])
        return self._in_layout(number, whole(layout))

    def _before_last(self) -> list[Any]:
        """Return the sums that other collectives take, behind which the last round is."""
        return [lane.op for node, decision, live in self._steps() if live and decision.communicates
                for number, layout in zip(node.inputs, decision.operands, strict=True) if isinstance(layout, Partial)
                for lane in self._tensors[number]]

    def _steps(self) -> Iterator[tuple[Node, Decision, bool]]:
        return zip(self.plan.program.nodes, self.plan.decisions, self.plan.live, strict=True)

    def _schedule(self, live: Sequence[bool]) -> tuple[list[int], list[list[int]]]:
        """Return the level of each node, and the tensors that are resolved behind each level."""
        self._late = set()
        levels, _ = self._levels_of(live, 0)
        late, behind = self._late_tensors()
        last = max([0, *(level for (node, _, is_live), level in zip(self._steps(), levels, strict=True)
                         if is_live and node not in behind)])
        self._late = late
        return self._levels_of(live, last)

    def _late_tensors(self) -> tuple[set[int], set[Node]]:
        """Return tensors on whose resolution no other collective depends, and the nodes that depend on it."""
        resolved: dict[int, list[Node]] = {}
        needs: dict[int, set[Node]] = {}
        for node, decision, live in self._steps():
            for operand, (number, layout) in enumerate(zip(node.inputs, decision.operands, strict=True)):
                if live and decision.takes(operand):
                    needs.setdefault(number, set()).add(node)
                    if is_resolved(self.plan.values[number].layout, layout):
                        resolved.setdefault(number, []).append(node)
        outputs = {number for number, layout in zip(self.plan.program.outputs, self.plan.outputs, strict=True)
                   if is_resolved(self.plan.values[number].layout, layout)}
        urgent: set[Node] = set()
        for node, decision, live in reversed(list(self._steps())):
            communicates = decision.communicates or any(plan.communicates for plan in decision.plans) or any(
                number in resolved or number in outputs for number in node.outputs)
            if live and (communicates or node in urgent or any(
                    not urgent.isdisjoint(needs.get(number, ())) for number in node.outputs)):
                urgent.add(node)
                urgent.update(self.plan.after[node])
        late = {number for number in {*resolved, *outputs} if urgent.isdisjoint(resolved.get(number, ()))}
        behind: set[Node] = set()
        numbers: set[int] = set()
        for node, decision, live in self._steps():
            takes = [number for operand, number in enumerate(node.inputs) if decision.takes(operand)]
            if live and (any(number in numbers or (number in late and node in resolved.get(number, ()))
                             for number in takes) or not behind.isdisjoint(self.plan.after[node])):
                behind.add(node)
                numbers.update(node.outputs)
        return late, behind

    def _levels_of(self, live: Sequence[bool], last: int) -> tuple[list[int], list[list[int]]]:
        """Return levels as `_schedule` does.

        Args:
            live: Whether each node contributes to a result or an effect.
            last: The level behind which late tensors are resolved.
        """
        plan, requests, levels = self.plan, {}, []  # type: ignore[var-annotated]
        at: dict[Node, int] = {}

        def needed(number: int, layout: Layout) -> int:
            if not is_resolved(plan.values[number].layout, layout):
                return self._levels[number]
            level = last if number in self._late else self._levels[number]
            requests.setdefault(level, {})[number] = None
            return level + 1

        for place, (node, decision) in enumerate(zip(plan.program.nodes, plan.decisions, strict=True)):
            level = 0
            if live[place]:
                level = max([0, *(at[before] for before in plan.after[node]), *(
                    needed(number, layout) for operand, (number, layout) in enumerate(zip(
                        node.inputs, decision.operands, strict=True)) if decision.takes(operand))])
            at[node] = level
            levels.append(level)
            for number in node.outputs:
                self._levels[number] = level
        outputs = zip(plan.program.outputs, plan.outputs, strict=True)
        highest = max([0, *levels, *(needed(number, layout) for number, layout in outputs)])
        return levels, [list(requests.get(level, ())) for level in range(highest + 1)]

    def _create(self, node: Node, decision: Decision) -> None:
        operands = [self._in_layout(number, layout) if decision.takes(place) else []
                    for place, (number, layout) in enumerate(zip(node.inputs, decision.operands, strict=True))]
        if decision.create_together is not None:
            self._create_together(node, decision, operands)
            return
        results: list[Lanes] = [[] for _ in node.outputs]
        created: list[list[Any]] = []
        for lane, units in enumerate(self.emission.units):
            before = [self._created.get(other, {lane: ()})[lane] for other in self.plan.after[node]]
            with tf.control_dependencies([operation for operations in before for operation in operations]):
                given = [self._given(node, decision, place, lane, lanes) for place, lanes in enumerate(operands)]
                made, operations = self._made(node, decision, given, units)
            created.append(operations)
            for number, tensor in enumerate(made):
                if not tensor.shape.is_fully_defined():
                    tensor.set_shape(static_shape(decision.results[number]))
                results[number].append(tensor)
        self._created[node] = created
        for number, result in zip(node.outputs, results, strict=True):
            self._tensors[number] = result

    def _made(self, node: Node, decision: Decision, given: Sequence[Any], units: Units) -> tuple[list[Any], list[Any]]:
        """Return the results of a rank's operation, and the operations that were created."""
        def make() -> list[tf.Tensor]:
            sizes = Creation(units, decision.results, self.emission.is_compiled)
            return list(decision.create(node.operation, given, sizes)) if decision.create is not None else list(
                tensorflow_graphs.copied(node.operation, given).outputs)

        if self.emission.compiles_each and node.type.startswith(_OTHERWISE_COMPILED):
            made = tf.function(make, autograph=False, jit_compile=True)()
        elif decision.create is None:
            operation = tensorflow_graphs.copied(node.operation, given)
            return list(operation.outputs), [operation]
        else:
            made = make()
        return made, [tensor.op for tensor in made]

    def _given(self, node: Node, decision: Decision, place: int, lane: int, lanes: Lanes) -> tf.Tensor | None:
        """Return what a rank's operation is given as an operand."""
        if place not in decision.vectors:
            return lanes[lane] if lanes else None
        original = self.plan.program.tensors[node.inputs[place]]
        return self.emission.units[lane].vector(decision.vectors[place], original.dtype, original.shape.rank == 0,
                                                 lanes[lane] if lanes else None)

    def _create_together(self, node: Node, decision: Decision, operands: Sequence[Lanes]) -> None:
        assert decision.create_together is not None
        graph = tf.compat.v1.get_default_graph()
        number = len(graph.get_operations())
        before = [lane for other in self.plan.after[node] for lane in self._created.get(other, ())]
        with tf.control_dependencies([operation for lane in before for operation in lane]):
            results = decision.create_together(self.emission, node.operation, operands)
            new = graph.get_operations()[number:] or [tf.no_op()]  # a rank without anything to do keeps the order
        for operation in () if decision.plans else new:
            tensorflow_graphs.locate(operation, node.operation)
        created = [operation for operation in new if operation.op_def.is_stateful or operation.type == "NoOp"]
        self._created[node] = [created + [lanes[lane].op for lanes in results if tf.is_symbolic_tensor(lanes[lane])]
                               for lane in range(len(self.emission.units))]
        self._tensors.update(zip(node.outputs, results, strict=True))

    def _in_layout(self, number: int, layout: Layout) -> Lanes:
        """Return a tensor in a layout; what is resolved has been so before."""
        value = self.plan.values[number]
        if value.layout in (layout, ListOf()) or layout == ListOf():
            return self._tensors[number]
        key = number, layout
        if key not in self._converted:
            resolved = is_resolved(value.layout, layout)
            tensors = self._converted[number, whole(layout)] if resolved else self._tensors[number]
            if key not in self._converted:
                self._converted[key] = self._as_lists(tensors, value, layout) if isinstance(layout, ListOf) else \
                    self._parts(tensors, replace(value, layout=layout), value.layout)
        return self._converted[key]

    def _as_lists(self, lists: Lanes, value: Value, layout: Layout) -> Lanes:
        """Return lists whose elements have another layout."""
        stacked = _stacked(value)
        tensors = [_stack(units, tensor, value) for units, tensor in zip(self.emission.units, lists, strict=True)]
        parts = self._parts(tensors, replace(stacked, layout=_stacked(replace(value, layout=layout)).layout),
                            stacked.layout)
        return [tensorflow_graphs.list_of(part) for part in parts]

    def _parts(self, tensors: Lanes, value: Value, layout: Layout) -> Lanes:
        """Return the parts of whole tensors, or sums in which fewer ranks count.

        Args:
            tensors: The tensors.
            value: What is known of the parts.
            layout: Layout of the tensors, if it is not resolved.
        """
        own = zip(self.emission.units, tensors, strict=True)
        if isinstance(value.layout, Divided):
            return [units.take(tensor, value, value.layout.division) for units, tensor in own]
        if isinstance(value.layout, Partial) and isinstance(layout, Partial):
            return [units.masked(tensor, layout.division) for units, tensor in own]
        if isinstance(value.layout, Partial):  # rank 0 has all of the sum
            return [tensor if units.rank == 0 else tf.zeros_like(tensor) for units, tensor in own]
        return tensors

    def _resolve(self, numbers: Sequence[int]) -> None:
        """Make tensors whole, in one round."""
        kinds: dict[str, list[int]] = {}
        for number in numbers:
            layout = _stacked(self.plan.values[number]).layout
            kinds.setdefault(layout.reduction if isinstance(layout, Partial) else self._gathering(
                self._tensors[number][0].dtype), []).append(number)
        for place, (kind, of_kind) in enumerate(kinds.items()):
            sent = [[_to_send(units, tensor, self.plan.values[number], kind) for units, tensor in zip(
                self.emission.units, self._tensors[number], strict=True)] for number in of_kind]
            nbytes = [_nbytes_of(self.plan.values[number], lanes[0].dtype)
                      for number, lanes in zip(of_kind, sent, strict=True)]
            received = self.emission.exchange(kind, sent, nbytes, together=place > 0)
            for number, lanes in zip(of_kind, received, strict=True):
                value, original = self.plan.values[number], self._tensors[number][0]
                self._converted[number, whole(value.layout)] = [
                    _received(units, tensor, value, original.dtype) for units, tensor in zip(
                        self.emission.units, lanes, strict=True)]

    def _gathering(self, dtype: tf.DType) -> str:
        """Return the kind of collective that gathers: XLA, which must know sizes, sums up parts that are padded."""
        is_whole = self.emission.is_compiled and not self.emission.compiles_each
        return "sum" if is_whole and dtype not in (tf.string, tf.variant) else "gather"


def _nbytes(tensor: tf.Tensor) -> int | None:
    return None if tensor.shape.num_elements() is None else tensor.shape.num_elements() * tensor.dtype.size


def _nbytes_of(value: Value, dtype: tf.DType) -> Size | None:
    shape = _stacked(value).shape
    known = [size for size in shape or () if size is not None]
    return product(known) * dtype.size if shape is not None and len(known) == len(shape) else None


def _to_send(units: Units, tensor: tf.Tensor, value: Value, kind: str) -> tf.Tensor:
    if isinstance(value.layout, ListOf):
        tensor, value = _stack(units, tensor, value), _stacked(value)
    if tensor.dtype.is_bool:
        tensor = tf.cast(tensor, tf.int32)
    if isinstance(value.layout, Divided):
        return (units.padded if kind == "sum" else units.to_gather)(tensor, value)
    assert isinstance(value.layout, Partial)
    return units.masked(tensor, value.layout.division) if value.layout.reduction == "sum" else tensor


def _received(units: Units, tensor: tf.Tensor, value: Value, dtype: tf.DType) -> tf.Tensor:
    stacked = _stacked(value)
    result = units.gathered(tensor, stacked) if isinstance(stacked.layout, Divided) else tensor
    result.set_shape(static_shape(replace(stacked, layout=REPLICATED)))
    if isinstance(value.layout, ListOf):
        return tensorflow_graphs.list_of(result)
    return tf.cast(result, dtype) if dtype.is_bool else result


def _stacked(value: Value) -> Value:
    """Return what is known of the elements of a list behind one another; of anything else, what is known of it."""
    if not isinstance(value.layout, ListOf):
        return value
    elements = value.layout.elements or REPLICATED
    if isinstance(elements, ListOf):
        raise NotImplementedError(f"Lists in a list must keep their layout. Received: layout={value.layout}")
    return Value(elements.at(elements.axis + 1) if isinstance(elements, Divided) else elements,
                 None if value.shape is None else (None, *value.shape))


def _stack(units: Units, tensor: tf.Tensor, value: Value) -> tf.Tensor:
    """Return the elements of a list behind one another."""
    elements = value.layout.elements if isinstance(value.layout, ListOf) else None
    own = own_shape(replace(value, layout=elements or REPLICATED))
    element_type = value.element_type
    if element_type is None:
        known = tensorflow_graphs.handle(tensor)
        assert known is not None, "TensorFlow knows the elements of a list"
        element_type = known[0]
    return tensorflow_graphs.stacked(tensor, tf.constant(-1) if own is None else units.vector(own), element_type)


class Creation:
    """Sizes of one rank, for what a rule creates.

    Args:
        units: Units of the rank.
        results: What is known of the results.
        is_compiled: Whether XLA compiles the operations.
    """

    def __init__(self, units: Units, results: Sequence[Value], is_compiled: bool) -> None:
        self.results: tuple[Value, ...] = tuple(results)
        self.is_compiled: bool = is_compiled
        self.number, self.vector, self.tensor = units.number, units.vector, units.tensor
        self.first, self.take = units.first, units.take

