"""Analysis: a pass over a program that decides how the ranks carry out each operation, before anything is created.

It goes through the operations once forwards, each with the layouts of its operands, and once backwards: what all ranks
would compute as a whole although each needs only its own part is divided as well. Functions of loops and branches are
programs of their own; the analysis of a program for given layouts of its inputs is made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hvkeras.partition import programs
from hvkeras.partition.broadcasts import leave_out_copies
from hvkeras.partition.decisions import Call, Decision, Rule, Value, decide, divided
from hvkeras.partition.integers import evaluate
from hvkeras.partition.layouts import Divided, Layout, ListOf, Replicated, is_resolved
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.programs import Node, Program
from hvkeras.partition.sizes import Shape


@dataclass(eq=False)
class Plan:
    """How the ranks carry out a program.

    Args:
        program: The program.
        values: What is known of each tensor.
        decisions: The decision of each node.
        outputs: Layouts of the results.
    """

    program: Program
    values: list[Value]
    decisions: list[Decision]
    outputs: tuple[Layout, ...]

    @property
    def results(self) -> tuple[Value, ...]:
        """What is known of the results."""
        return tuple(replace(self.values[number], layout=layout)
                     for number, layout in zip(self.program.outputs, self.outputs, strict=True))

    @cached_property
    def after(self) -> dict[Node, tuple[Node, ...]]:
        """Nodes that must run before each node, and before operands that it does not take."""
        after: dict[Node, tuple[Node, ...]] = {}
        of_tensors: dict[int, tuple[Node, ...]] = {}
        for node, decision in zip(self.program.nodes, self.decisions, strict=True):
            after[node] = tuple(dict.fromkeys([*node.after, *(
                other for operand, number in enumerate(node.inputs) if not decision.takes(operand)
                for other in of_tensors.get(number, ()))]))
            of_tensors.update(dict.fromkeys(node.outputs, after[node]))
        return after

    @cached_property
    def live(self) -> list[bool]:
        """Whether each node contributes to a result or an effect, if only by its place in the order."""
        needed, live = set[Any](self.program.outputs), [True] * len(self.decisions)
        for place in reversed(range(len(live))):
            node, decision = self.program.nodes[place], self.decisions[place]
            live[place] = bool(node.operation.op_def.is_stateful or not needed.isdisjoint((node, *node.outputs)))
            if live[place]:
                needed.update(self.after[node])
                needed.update(number for operand, number in enumerate(node.inputs) if decision.takes(operand))
        return live

    @cached_property
    def communicates(self) -> bool:
        """Whether carrying out the program takes collectives."""
        taken = [*zip(self.program.outputs, self.outputs, strict=True)]
        for node, decision, live in zip(self.program.nodes, self.decisions, self.live, strict=True):
            if live:
                if decision.communicates or any(plan.communicates for plan in decision.plans):
                    return True
                taken += [needed for operand, needed in enumerate(zip(node.inputs, decision.operands, strict=True))
                          if decision.takes(operand)]
        return any(is_resolved(self.values[number].layout, layout) for number, layout in taken)


class Analysis:
    """Plans of the programs of a function.

    Args:
        rules: The rule of each type of operation.
        otherwise: The rule of types that have none there.
    """

    def __init__(self, rules: Mapping[str, Rule], otherwise: Rule | None = None) -> None:
        self._rules, self._otherwise = rules, otherwise
        self._programs: dict[int, Program] = {}
        self._plans: dict[Any, Plan] = {}
        self._names: dict[Node, str] = {}
        self._named: Counter[str] = Counter()

    def plan(self, graph: Any, inputs: Sequence[Value], outputs: Sequence[Layout] | None = None) -> Plan:
        """Return the plan of a function.

        Args:
            graph: The graph of the function.
            inputs: What is known of its inputs.
            outputs: Layouts that its results must have; None: as they become.
        """
        key = id(graph), tuple(inputs), None if outputs is None else tuple(outputs)
        if key not in self._plans:
            if id(graph) not in self._programs:
                self._programs[id(graph)] = programs.read(graph)
            plan = self._new_plan(self._programs[id(graph)], inputs, outputs)
            self._plans[key] = self._plans[key[0], key[1], plan.outputs] = plan  # asked for what came anyway
        return self._plans[key]

    def _new_plan(self, program: Program, inputs: Sequence[Value], outputs: Sequence[Layout] | None) -> Plan:
        values = [Value() for _ in program.tensors]
        for number, value in zip(program.inputs, inputs, strict=True):
            values[number] = value
        calls: list[Call] = []
        decisions: list[Decision] = []
        for node in program.nodes:
            call = Call(node.operation, [values[number] for number in node.inputs],
                        [program.users[number] for number in node.inputs], self.plan, self._name(node))
            calls.append(call)
            decision = self._decided(call)
            decisions.append(decision)
            for number, value in zip(node.outputs, decision.results, strict=True):
                values[number] = value
        wanted = tuple(values[number].layout for number in program.outputs) if outputs is None else tuple(outputs)
        self._divide_backwards(program, calls, values, decisions, wanted)
        leave_out_copies(program, values, decisions)
        return Plan(program, values, decisions, wanted)

    def _name(self, node: Node) -> str:
        """Return a name of a node, the same each time; operations of several functions may have the same name."""
        if node not in self._names:
            name = node.operation.name
            self._named[name] += 1
            self._names[node] = name if self._named[name] == 1 else f"{name}#{self._named[name]}"
        return self._names[node]

    def _decided(self, call: Call) -> Decision:
        operation = call.operation
        integers = evaluate(operation, [value.integers for value in call.operands],
                            [value.shape for value in call.operands])
        decision = decide(call, self._rules.get(call.type, self._otherwise))
        results, first = [], call.operands[0] if call.operands else Value()
        sizes_of = first.layout if call.type == "Shape" else first.sizes_of
        level = _level(call, decision)
        for output, value, known in zip(operation.outputs, decision.results, integers, strict=True):
            shape = value.shape if isinstance(value.layout, ListOf) else known.shape if known is not None else _merged(
                value.shape, _static(output))
            results.append(replace(
                value, shape=shape, integers=known or value.integers, sizes_of=sizes_of, level=level))
        if results and all(known is not None and known.is_known for known in integers):
            layouts = tuple(value.layout for value in call.operands)
            return Decision(layouts, tuple(replace(value, layout=Replicated(), level=0) for value in results),
                            create=_create_integers, takes_operands=False)
        return replace(decision, results=tuple(results))

    def _divide_backwards(self, program: Program, calls: Sequence[Call], values: list[Value],
                          decisions: list[Decision], outputs: Sequence[Layout]) -> None:
        """Divide what is computed as a whole, where all that use it take the same part of it."""
        uses: list[list[Layout]] = [[] for _ in values]
        for number, layout in zip(program.outputs, outputs, strict=True):
            uses[number].append(layout)
        for place in reversed(range(len(decisions))):
            node, call = program.nodes[place], calls[place]
            part = _common_part(node, values, uses)
            if part is not None and all(isinstance(value.layout, Replicated) for value in call.operands):
                found = self._divided_as(call, decisions[place], part)
                if found is not None:
                    decisions[place] = found
                    values[node.outputs[0]] = found.results[0]
            for number, layout in zip(node.inputs, decisions[place].operands, strict=True):
                uses[number].append(layout)

    def _divided_as(self, call: Call, decision: Decision, part: Divided) -> Decision | None:
        rule = self._rules.get(call.type)
        again = Call(call.operation, call.operands, call.uses, self.plan, call.name)
        again.wanted = part
        found = None if rule is None else rule(again)
        if isinstance(found, Decision) and found.results[0].layout == part:
            return replace(found, results=(replace(decision.results[0], layout=part),))
        if not isinstance(found, Pattern) or len(found.results) != 1:
            return None
        new = divided(again, found, found.results[0][part.axis], part)
        if new is None or not isinstance(new.results[0].layout, Divided):
            return None
        return replace(new, results=(replace(decision.results[0], layout=new.results[0].layout),))


def _level(call: Call, decision: Decision) -> int:
    """Return how many collectives precede the results of an operation, one after another."""
    return decision.communicates + max([0, *(
        value.level + is_resolved(value.layout, layout)
        for operand, (value, layout) in enumerate(zip(call.operands, decision.operands, strict=True))
        if decision.takes(operand))])


def _common_part(node: Node, values: Sequence[Value], uses: Sequence[Sequence[Layout]]) -> Divided | None:
    """Return the part of the only result of an operation that all its users take; None if one takes another, or all."""
    if len(node.outputs) != 1 or not isinstance(values[node.outputs[0]].layout, Replicated):
        return None
    taken = set(uses[node.outputs[0]])
    part = taken.pop() if len(taken) == 1 else None
    return part if isinstance(part, Divided) else None


def _create_integers(operation: Any, _operands: Any, sizes: Any) -> list[Any]:
    return [sizes.tensor(value.integers, output.dtype)
            for output, value in zip(operation.outputs, sizes.results, strict=True)]


def _static(output: Any) -> Shape | None:
    return None if output.shape.rank is None else tuple(output.shape.as_list())


def _merged(shape: Shape | None, static: Shape | None) -> Shape | None:
    """Return a shape with what TensorFlow knows of it."""
    if shape is None or static is None:
        return static if shape is None else shape
    for size, known in zip(shape, static, strict=True):
        if isinstance(size, int) and isinstance(known, int) and size != known:
            raise AssertionError(f"A rule must derive the shape of a result. Received: shape={shape}, static={static}")
    return tuple(known if size is None else size for size, known in zip(shape, static, strict=True))


