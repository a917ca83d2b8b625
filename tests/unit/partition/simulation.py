"""Ranks that one process simulates carry out a case; what they compute is compared with what one process computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.partition.analysis import Analysis, Plan
from hvkeras.partition.collectives import Lanes, Simulated
from hvkeras.partition.decisions import Rule, Value, static_shape
from hvkeras.partition.emission import Emission
from hvkeras.partition.layouts import REPLICATED, Divided, Division, Layout, ListOf, Partial
from hvkeras.partition.sizes import Polynomial, Size, value_of
from hvkeras.partition.units import Units
from unit.partition.brute_force import Case, Combination, Operand, parts_of, whole_of
from unit.partition.cases import CASES

TOLERANCES = {"float16": 2e-3, "float32": 1e-6, "complex64": 1e-6}  # of others: 1e-12
HUGE = 1e30  # the largest numbers, which stand for no element, do not matter for tolerances
AT_ONCE = 32  # plans in a graph

COMBINED = {"Moments": "Mean"}
"""Types that are made of others when a program is read."""


class Traced:
    """A case that has been traced, and what it computes of whole tensors.

    Args:
        case: The case.
        numbers: Numbers of rows.
        is_static: Whether the number of rows, of which there is one, is known when the function is traced.
    """

    def __init__(self, case: Case, numbers: Sequence[int] = (7, 1), is_static: bool = False) -> None:
        self.case, self.numbers = case, tuple(numbers)
        self._static: int | None = self.numbers[0] if is_static else None
        self.whole: Any = tf.function(case.function, autograph=False).get_concrete_function(
            *(
                tf.TensorSpec(
                    [size if isinstance(size, int) else None for size in self._value(operand, REPLICATED).shape or ()],
                    operand.dtype,
                )
                for operand in case.operands
            )
        )
        generator = np.random.default_rng(1)
        self.arrays = {
            number: [
                operand.make(generator, [value_of(size, {"rows": number}) for size in operand.shape])
                for operand in case.operands
            ]
            for number in numbers
        }
        self.wanted = {
            number: [output.numpy() for output in tf.nest.flatten(self.whole(*map(tf.constant, arrays)))]
            for number, arrays in self.arrays.items()
        }

    @functools.cached_property
    def types(self) -> set[str]:
        """Types of operations that occur in the function, and in those that it calls."""
        definition = self.whole.graph.as_graph_def()
        return {node.op for node in definition.node}.union(
            *({node.op for node in function.node_def} for function in definition.library.function)
        )

    def plans(
        self, rules: Mapping[str, Rule], chosen: Sequence[Combination], is_resolved: bool = False
    ) -> dict[Combination, Plan]:
        """Return a plan for each combination of layouts of the operands.

        Args:
            rules: The rules.
            chosen: The combinations.
            is_resolved: Whether the ranks make results whole.
        """
        analysis, graph = Analysis(rules), self.whole.graph
        outputs = [REPLICATED] * len(graph.outputs) if is_resolved else None
        captured = [
            Value(REPLICATED, None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
            for tensor in graph.inputs[len(self.case.operands) :]
        ]
        return {
            layouts: analysis.plan(graph, [*map(self._value, self.case.operands, layouts), *captured], outputs)
            for layouts in chosen
        }

    def _value(self, operand: Operand, layout: Layout) -> Value:
        """Return what is known of an operand."""
        if self._static is None:
            return Value(layout, tuple(operand.shape))
        number, division = self._static, Division("rows", self._static)
        shape = tuple(value_of(size, {"rows": number}) for size in operand.shape)
        if isinstance(layout, Divided):
            outer, each = (value_of(times, {"rows": number}) for times in (layout.outer, layout.each))
            layout = Divided(division, layout.axis, outer, each)
        return Value(replace(layout, division=division) if isinstance(layout, Partial) else layout, shape)

    def compare(self, plans: Mapping[Combination, Plan], sizes: Sequence[int]) -> int:
        """Compare what ranks compute with what one process does; return how many comparisons there were.

        Args:
            plans: The plan for each combination of layouts of the operands.
            sizes: Numbers of ranks.
        """
        comparisons = 0
        for size, first in itertools.product(sizes, range(0, len(plans), AT_ONCE)):
            some = dict(itertools.islice(plans.items(), first, first + AT_ONCE))
            run, generator = self._simulated(some, size), np.random.default_rng(2)
            for number in self.numbers:
                for (layouts, plan), results in zip(some.items(), run(number, generator), strict=True):
                    told = f"{size} ranks, {number} rows, {told_of(layouts)}"
                    for value, lanes, right in zip(plan.results, results, self.wanted[number], strict=True):
                        self._compare_result(value, lanes, right, number, told)
                        comparisons += 1
        return comparisons

    def is_close(self, got: np.ndarray, right: np.ndarray) -> bool:
        """Return whether an array is another one but for rounding, relative to its largest element."""
        if got.shape != right.shape or right.dtype == object or np.array_equal(got, right):
            return np.array_equal(got, right)
        with np.errstate(all="ignore"):  # numbers that are infinite, or none
            tolerance = TOLERANCES.get(right.dtype.name, 1e-12) if self.case.tolerance is None else self.case.tolerance
            largest = np.max(np.abs(right), initial=0, where=np.abs(right).astype("float64") < HUGE)
            return np.allclose(got, right, tolerance, tolerance * largest, equal_nan=True)

    def _compare_result(self, value: Value, lanes: Lanes, right: np.ndarray, number: int, told: str) -> None:
        told = f"a result that is {value.layout}, {told}"
        parts = [lane.numpy() for lane in lanes]
        for got in parts if value.layout == REPLICATED else [whole_of(parts, value.layout, number)]:
            assert got.shape == right.shape, f"{told}: {got.shape}, not {right.shape}"
            if not self.is_close(got, right):
                np.testing.assert_array_equal(got, right, told)
        if value.shape is not None:
            sizes = tuple(_number(size, number) for size in value.shape)
            assert all(size in (None, its) for size, its in zip(sizes, right.shape, strict=True)), f"{told}: {sizes}"
        if value.integers is not None:
            entries = [_number(entry, number) for entry in value.integers.entries]
            assert all(entry in (None, its) for entry, its in zip(entries, right.ravel(), strict=True)), (
                f"{told}: {entries}"
            )

    def _simulated(self, plans: Mapping[Combination, Plan], size: int) -> Any:
        """Return a function that carries out plans, and returns the results of each."""
        operands, captured = self.case.operands, self.whole.captured_inputs
        keys = list(dict.fromkeys((place, layout) for layouts in plans for place, layout in enumerate(layouts)))
        specifications = [
            tf.TensorSpec(static_shape(self._value(operands[place], layout)), operands[place].dtype)
            for place, layout in keys
            for _ in range(size)
        ]

        @tf.function(autograph=False)
        def run(number: tf.Tensor, *parts: tf.Tensor) -> Any:
            units = [Units(rank, size) for rank in range(size)]
            for own in units:
                own.set_total("rows", number)
            lanes = {key: list(parts[place * size : (place + 1) * size]) for place, key in enumerate(keys)}
            results = []
            for layouts, plan in plans.items():
                inputs = [*(lanes[key] for key in enumerate(layouts)), *([tensor] * size for tensor in captured)]
                try:
                    results.append(Emission(units, Simulated()).run(plan, inputs))
                except Exception as error:
                    raise AssertionError(f"{size} ranks, {told_of(layouts)}") from error
            return results

        concrete = run.get_concrete_function(tf.TensorSpec((), tf.int64), *specifications)

        def run_on(number: int, generator: np.random.Generator) -> Any:
            arrays = self.arrays[number]
            parts = [
                part for place, layout in keys for part in parts_of(arrays[place], layout, number, size, generator)
            ]
            return concrete(tf.constant(number, tf.int64), *map(tf.constant, parts))

        return run_on


@functools.cache
def traced(name: str) -> Traced:
    """Return a case, traced."""
    return Traced(CASES[name])


def told_of(layouts: Sequence[Layout]) -> str:
    """Return layouts in words."""
    return " and ".join(map(str, layouts))


def gathers(plan: Plan) -> bool:
    """Return whether something divided is gathered, beside results."""
    for node, decision in zip(plan.program.nodes, plan.decisions, strict=True):
        for number, needed in zip(node.inputs, decision.operands, strict=True):
            layouts = [
                (layout.elements or REPLICATED) if isinstance(layout, ListOf) else layout
                for layout in (plan.values[number].layout, needed)
            ]
            if isinstance(layouts[0], Divided) and layouts[0] != layouts[1]:
                return True
        if any(gathers(called) for called in decision.plans):
            return True
    return False


def _number(size: Size | None, rows: int) -> int | None:
    return value_of(size, dict.fromkeys(size.symbols, rows)) if isinstance(size, Polynomial) else size
