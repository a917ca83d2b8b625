"""Partitioning of a function."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvkeras.partition.analysis import Analysis, Plan
from hvkeras.partition.checking import Check
from hvkeras.partition.collectives import Collectives, Lanes
from hvkeras.partition.decisions import Rule, Value
from hvkeras.partition.emission import Emission, Exchange, Run
from hvkeras.partition.layouts import REPLICATED, Divided, Division
from hvkeras.partition.reports import Report, report
from hvkeras.partition.rules.state import effects_on_first
from hvkeras.partition.sizes import rows
from hvkeras.partition.units import Units, common_number

_UNEQUAL = ("All inputs of a source must have as many rows. Received: source={}, rows={{}}. "
            "HINT: name inputs with other rows as another source.")


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Make objects that stay without looking again and again for some that may go: a third of the time.

    They become old at once, or else all of them would be looked at as soon as the next one is made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what somebody has frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class Partitioned:
    """A function that several ranks carry out together.

    Args:
        graph: The graph of the function; of one that XLA compiles, a graph that calls it.
        sources: For each source of data, by name, the numbers of the inputs whose first dimensions are its rows.
        rules: The rule of each type of operation.
        effects: Which ranks carry out operations with effects outside of the graph, such as printing, summaries, and
            functions of Python: "all", or rank 0 alone ("first"), which sends the results to all.

    Raises:
        ValueError: If an input of a source cannot have its rows, or there is no such `effects`.
    """

    def __init__(self, graph: Any, sources: Mapping[str, Sequence[int]], rules: Mapping[str, Rule], effects: str = "all"
                 ) -> None:
        if effects not in ("all", "first"):
            raise ValueError(f"Effects must be those of 'all' ranks or of the 'first'. Received: effects={effects}")
        self.graph: Any = graph
        self.sources: dict[str, tuple[int, ...]] = {name: tuple(inputs) for name, inputs in sources.items()}
        divisions = {number: Division(name, self._total(name)) for name, inputs in self.sources.items()
                     for number in inputs}
        values: list[Value] = []
        for number, tensor in enumerate(graph.inputs):
            shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
            division = divisions.get(number)
            values.append(Value(REPLICATED, shape) if division is None else Value(
                Divided(division, 0), (division.total, *tensor.shape[1:].as_list())))
        analysis = Analysis(rules, effects_on_first if effects == "first" else None)
        self._rounds: list[list[Exchange]] = []
        self._report: Report | None = None
        with _without_collection():
            self.plan: Plan = analysis.plan(graph, values, [REPLICATED] * len(graph.outputs))

    def _total(self, source: str) -> Any:
        """Return the number of rows of a source."""
        shapes = [self.graph.inputs[number].shape for number in self.sources[source]]
        sizes = {shape[0] if shape.rank else -1 for shape in shapes}
        known = sizes - {None}
        if len(known) > 1 or -1 in known:
            raise ValueError(f"All inputs of a source must have as many rows, in their first dimension. Received: "
                             f"source={source}, shapes={shapes}. HINT: name inputs with other rows as another source.")
        return known.pop() if known else rows(source)

    def create(self, inputs: Sequence[Lanes], ranks: Sequence[int], size: int, collectives: Collectives) -> list[Lanes]:
        """Create the functions of ranks in the current graph.

        Args:
            inputs: The inputs of each of the ranks; those with rows are whole.
            ranks: The ranks.
            size: Number of ranks.
            collectives: The collectives.

        Returns:
            The results of each of the ranks.
        """
        return self._create(inputs, ranks, size, collectives)[0]

    def create_checked(self, inputs: Sequence[Lanes], ranks: Sequence[int], size: int, collectives: Collectives
                       ) -> tuple[list[Lanes], Lanes, Check]:
        """Create the functions of ranks, and the whole function beside, each tensor of which is compared.

        Args:
            inputs: The inputs of each of the ranks; those with rows are whole.
            ranks: The ranks.
            size: Number of ranks.
            collectives: The collectives.

        Returns:
            The results, and the differences, of each of the ranks; and the check that finds in them the first tensor
            that differs.
        """
        results, run = self._create(inputs, ranks, size, collectives)
        check = Check(run, dict(zip(self.plan.program.inputs, inputs, strict=True)))
        return results, check.differences(), check

    def _create(self, inputs: Sequence[Lanes], ranks: Sequence[int], size: int, collectives: Collectives
                ) -> tuple[list[Lanes], Run]:
        units = [Units(rank, size) for rank in ranks]
        given = [list(lanes) for lanes in inputs]
        values = [self.plan.values[number] for number in self.plan.program.inputs]
        for name, numbers in self.sources.items():
            for lane, own in enumerate(units):
                own.set_total(name, common_number([given[number][lane] for number in numbers], _UNEQUAL.format(name)))
            for number in numbers:
                layout = values[number].layout
                assert isinstance(layout, Divided)
                given[number] = [own.take(tensor, values[number], layout.division, copies=True)
                                 for own, tensor in zip(units, given[number], strict=True)]
        emission = Emission(units, collectives)
        run = Run(emission, self.plan, given)
        with _without_collection():
            results = run.run()
        self._rounds = list(emission.rounds)
        return results, run

    @property
    def report(self) -> Report:
        """What became of the function; with what its ranks exchange, once it has been created."""
        if self._report is None:
            self._report = report(self.plan, ())
        return replace(self._report, rounds=tuple(map(tuple, self._rounds)))
