"""Branches and loops: their functions are programs of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Value, computed_by_all, static_shape
from hvkeras.partition.integers import Integers
from hvkeras.partition.layouts import REPLICATED, Divided, Partial, innermost, joined, whole
from hvkeras.partition.rule_table import rule
from hvkeras.partition.rules.lists import either
from hvkeras.partition.sizes import Polynomial, Size


def _arguments(call: Call, first: int) -> list[Value]:
    """Return what functions are given: sums of the ranks are made whole before."""
    return [replace(value, layout=REPLICATED) if isinstance(value.layout, Partial) else value
            for value in call.operands[first:]]


def _symbols(value: Value) -> set[str]:
    """Return the symbols of rows on which a tensor depends."""
    layout = innermost(value.layout)
    sizes = [*(value.shape or ()), *(() if value.integers is None else value.integers.entries)]
    if isinstance(layout, Divided):
        sizes += [layout.division.total, layout.outer, layout.each]
    if isinstance(layout, Partial) and layout.division is not None:
        sizes.append(layout.division.total)
    return set[str]().union(*(size.symbols for size in sizes if isinstance(size, Polynomial)))


def _outside(results: Sequence[Value], arguments: Sequence[Value]) -> list[Value]:
    """Return what is known of the results of a function outside of it, where rows that it reads itself are unknown."""
    known = set[str]().union(*(_symbols(value) for value in arguments))
    outside: list[Value] = []
    for value in results:
        if _symbols(value) <= known:
            outside.append(value)
            continue
        shape = None if value.shape is None else tuple(_if_known(size, known) for size in value.shape)
        integers = None if value.integers is None else Integers(value.integers.shape, tuple(
            _if_known(entry, known) for entry in value.integers.entries))
        outside.append(replace(value, layout=whole(value.layout), shape=shape, integers=integers))
    return outside


def _if_known(size: Size | None, known: set[str]) -> Size | None:
    return None if isinstance(size, Polynomial) and not size.symbols <= known else size


def function_of(call: Call, name: str) -> Any:
    """Return the graph of a function that an operation calls."""
    return tensorflow_graphs.function_named(call.operation.graph, name)


@rule("If", "StatelessIf", "Case", "StatelessCase")
def branch(call: Call) -> Decision:
    """All ranks take one branch. Results have a layout that both branches' get without a collective, or are whole."""
    attributes = call.operation.node_def.attr
    is_if = "then_branch" in attributes
    functions = [attributes[name].func for name in ("then_branch", "else_branch")] if is_if else \
        attributes["branches"].list.func
    names = [function.name for function in functions]
    graphs = [function_of(call, name) for name in names]
    arguments = _arguments(call, 1)
    plans = [call.plan(graph, arguments, None) for graph in graphs]
    results = _outside(plans[0].results, arguments)
    for plan in plans[1:]:
        others = _outside(plan.results, arguments)
        results = [either(result, other) for result, other in zip(results, others, strict=True)]
    layouts = [result.layout for result in results]
    plans = [call.plan(graph, arguments, layouts) for graph in graphs]

    def create_together(emission: Any, operation: Any, operands: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        chosen = operands[0]
        if any(plan.communicates for plan in plans):
            chosen = emission.exchange("first", [chosen])[0]

        def run(plan: Any) -> list[tf.Tensor]:
            return [tensor for lanes in emission.run(plan, operands[1:]) for tensor in lanes] or [tf.constant(0)]

        branches = [lambda plan=plan: run(plan) for plan in plans]
        made = tf.cond(chosen[0], *branches) if is_if else tf.switch_case(chosen[0], branches)
        return _lanes(made, len(emission.units), len(operation.outputs))

    return Decision((REPLICATED, *(value.layout for value in arguments)), tuple(results),
                    create_together=create_together, plans=tuple(plans))


def _lanes(tensors: Any, lanes: int, number: int) -> list[list[tf.Tensor]]:
    flat = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    return [flat[place * lanes:(place + 1) * lanes] for place in range(number)]


@rule("PartitionedCall", "StatefulPartitionedCall")
def compiled_call(call: Call) -> Decision:
    """A function that XLA compiles stays one, unless the ranks communicate in it in a way that XLA cannot compile.

    Then parts of it are compiled.
    """
    arguments = _arguments(call, 0)
    if all(value.layout == REPLICATED for value in arguments) and not tensorflow_graphs.reads_batches(
            function_of(call, call.operation.node_def.attr["f"].func.name)):
        return replace(computed_by_all(call), create=lambda operation, given, _: tensorflow_graphs.called_again(
            operation, given))
    plan = call.plan(function_of(call, call.operation.node_def.attr["f"].func.name), arguments, None)

    def create_together(emission: Any, operation: Any, operands: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        def run() -> list[tf.Tensor]:
            results = emission.compiled(each=in_parts).run(plan, operands)
            return [tensor for lanes in results for tensor in lanes]

        in_parts = plan.communicates and not emission.compiles_collectives
        made = run() if in_parts else tf.function(run, autograph=False, jit_compile=True)()
        return _lanes(made, len(emission.units), len(operation.outputs))

    return Decision(tuple(value.layout for value in arguments), tuple(_outside(plan.results, arguments)),
                    create_together=create_together, plans=(plan,))


@rule("While", "StatelessWhile")
def loop(call: Call) -> Decision:
    """What a round hands to the next one has the same layout each time: found by analysing the round until it is."""
    attributes = call.operation.node_def.attr
    body, condition = (function_of(call, attributes[name].func.name) for name in ("body", "cond"))
    carried = [number for number in range(len(call.operands)) if not _is_handed_on(body, number)]
    values = _carried_values(call, body, carried)
    layouts = [value.layout for value in values]
    plan, test = call.plan(body, values, layouts), call.plan(condition, values, [REPLICATED])

    def create_together(emission: Any, operation: Any, operands: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        return _created_loop(emission, operation, operands, plan, test, {number: values[number] for number in carried})

    return Decision(tuple(layouts), tuple(values), create_together=create_together, plans=(plan, test))


def _carried_values(call: Call, body: Any, carried: Sequence[int]) -> list[Value]:
    """Return what is known of what each round is given, whichever it is: a sum may go from round to round."""
    values, forced = _arguments(call, 0), set[int]()
    for number in carried:
        values[number] = call.operands[number]
    while True:
        results, new = _outside(call.plan(body, values, None).results, values), list(values)
        for number in carried:
            if joined(values[number].layout, results[number].layout) is None:
                forced.add(number)
            new[number] = either(values[number], results[number])
            if number in forced:
                new[number] = replace(new[number], layout=whole(values[number].layout))
        if new == values:
            return values
        values = new


def _created_loop(emission: Any, operation: Any, operands: Sequence[list[tf.Tensor]], plan: Any, test: Any,
                  carried: dict[int, Value]) -> list[list[tf.Tensor]]:
    """Create the loop of all ranks in a graph, in which they decide together whether to go on if they must."""
    lanes, communicates = len(emission.units), plan.communicates or test.communicates

    def given(tensors: Any) -> list[list[tf.Tensor]]:
        inputs = list(operands)
        for number, own in zip(carried, _lanes(tensors, lanes, len(carried)), strict=True):
            inputs[number] = own
        return inputs

    def continues(*tensors: tf.Tensor) -> tf.Tensor:
        tested = emission.run(test, given(tensors))[0]
        return (emission.exchange("first", [tested])[0] if communicates else tested)[0]

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        results = emission.run(plan, given(tensors))
        return [tensor for number in carried for tensor in results[number]]

    start = [(value, tensor) for number, value in carried.items() for tensor in operands[number]]
    made = tf.while_loop(
        continues, run, [tensor for _, tensor in start], shape_invariants=[_invariant(*pair) for pair in start],
        parallel_iterations=operation.get_attr("parallel_iterations"), name=operation.name.rpartition("/")[2])
    return given(made)


def _is_handed_on(body: Any, number: int) -> bool:
    """Return whether a round hands on what it was given."""
    given, result = body.inputs[number], body.outputs[number]
    while result.op.type == "Identity" and result.dtype != tf.variant:
        result = result.op.inputs[0]
    return bool(result.name == given.name or given.dtype == tf.resource)


def _invariant(value: Value, tensor: tf.Tensor) -> tf.TensorShape:
    return tensor.shape if tensor.dtype in (tf.variant, tf.resource) else static_shape(value)
