"""Reports: what became of a function that several ranks carry out together."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.analysis import Plan
from hvkeras.partition.decisions import Decision, elements
from hvkeras.partition.emission import Exchange
from hvkeras.partition.layouts import Divided, Layout, ListOf, Partial, innermost, is_resolved
from hvkeras.partition.programs import Node
from hvkeras.partition.sizes import Polynomial, value_of


@dataclass(frozen=True)
class Gathered:
    """An operation for which parts of a tensor were made whole.

    Args:
        type: Type of the operation.
        name: Its name.
        line: The user's line that made it, such as "train.py:12 in loss"; empty if it is not known.
        operands: What is known of the operands that were gathered: layout and shape.
        work: About how many elements it computes, of sources with some hundred rows: what all ranks compute.
    """

    type: str
    name: str
    line: str
    operands: tuple[str, ...]
    work: float


@dataclass(frozen=True)
class Report:
    """What became of the operations of a function, and what its ranks exchange.

    Args:
        divided: How many operations of each type compute with a part on each rank.
        by_all: How many operations of each type all ranks carry out, on whole tensors.
        gathered: Operations for which parts were made whole.
        rounds: What is exchanged in each round; a round in a loop is one.
        digest: A text that ranks have in common if they carry out the function in the same way.
        work: About how many elements are computed, of sources with some hundred rows.
        work_by_all: How many of these all ranks compute.
        is_compiled: Whether XLA compiles a part of the function.
        costly: What all ranks compute, most work first: a type and the user's line, its work, and why.
    """

    divided: Mapping[str, int]
    by_all: Mapping[str, int]
    gathered: tuple[Gathered, ...]
    rounds: tuple[tuple[Exchange, ...], ...]
    digest: str
    work: float
    work_by_all: float
    is_compiled: bool
    costly: tuple[tuple[str, float, str], ...]

    @property
    def symbols(self) -> set[str]:
        """Sources of rows on which it depends how many bytes are exchanged."""
        sizes = [size for round_ in self.rounds for exchange in round_ for size in exchange.nbytes]
        return set[str]().union(*(size.symbols for size in sizes if isinstance(size, Polynomial)))

    def nbytes(self, rows: Mapping[str, int]) -> int:
        """Return how many bytes are exchanged; tensors of unknown shapes do not count.

        Args:
            rows: How many rows each source has.
        """
        return sum(value_of(size, rows) for round_ in self.rounds for exchange in round_ for size in exchange.nbytes
                   if size is not None)

    def __str__(self) -> str:
        text = (f"{sum(self.divided.values())} operations divided, {sum(self.by_all.values())} computed by all ranks, "
                f"{len(self.gathered)} of them with gathered rows; {len(self.rounds)} rounds")
        lines = [f"  {each.type} {each.name}{each.line and f', {each.line}'}: {', '.join(each.operands)}"
                 for each in sorted(self.gathered, key=lambda each: -each.work)]
        return "\n".join([text, *lines])


def report(plan: Plan, rounds: Sequence[Sequence[Exchange]]) -> Report:
    """Return the report of a plan.

    Args:
        plan: The plan.
        rounds: What was exchanged.
    """
    divided, by_all, gathered = Counter[str](), Counter[str](), list[Gathered]()
    work, costly = [0.0, 0.0], dict[tuple[str, str], float]()
    for owner, node, decision in _decisions(plan):
        moved = [number for number, layout in zip(node.inputs, decision.operands, strict=True) if _is_divided(
            owner.values[number].layout) and is_resolved(owner.values[number].layout, layout)]
        layouts = [*decision.operands, *(owner.values[number].layout for number in node.outputs)]
        is_divided = any(_is_divided(layout) or isinstance(layout, Partial) for layout in layouts)
        (divided if is_divided else by_all)[node.type] += 1
        own_work = 0.0 if decision.plans else _work(owner, node)
        work[is_divided] += own_work
        if not is_divided and own_work:
            why = "its rows were gathered" if moved else "it has no rows of a batch"
            place = f"{node.type}{(line := tensorflow_graphs.user_line(node.operation)) and f', {line}'}", why
            costly[place] = costly.get(place, 0.0) + own_work
        if moved:
            gathered.append(Gathered(
                node.type, node.operation.name, tensorflow_graphs.user_line(node.operation),
                tuple(f"{owner.values[number].shape} {owner.values[number].layout}" for number in moved),
                own_work))
    most = sorted(costly.items(), key=lambda each: -each[1])
    return Report(divided, by_all, tuple(gathered), tuple(map(tuple, rounds)), _digest(plan), sum(work), work[0],
                  any(_is_compiled(node) for _, node, _ in _decisions(plan)),
                  tuple((name, amount, why) for (name, why), amount in most))


def _is_compiled(node: Node) -> bool:
    return node.type in ("PartitionedCall", "StatefulPartitionedCall") and tensorflow_graphs.is_compiled(node.operation)


_CONTRACTIONS = ("BatchMatMul", "Conv", "DepthwiseConv", "Einsum", "MatMul", "SparseTensorDenseMatMul")


def _work(owner: Plan, node: Node) -> float:
    """Estimate how many elements an operation computes; for products of matrices, how many it multiplies.

    Of operands [a, b] and [b, c], and a result [a, c], the product of the numbers of elements is (a b c) squared.
    """
    values = [owner.values[number] for number in (*node.inputs, *node.outputs)]
    sizes = [elements(value.shape) for value in values
             if value.shape is not None and not isinstance(value.layout, ListOf)]
    if node.type.lstrip("_").startswith(_CONTRACTIONS):
        return math.sqrt(math.prod(sorted(sizes)[-3:]))
    return max(sizes, default=0.0) if node.type not in _FREE else 0.0


_FREE = ("Const", "Identity", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp", "Reshape", "Shape", "StopGradient",
         "VarHandleOp", "ExpandDims", "Squeeze")


def _decisions(plan: Plan) -> Iterator[tuple[Plan, Node, Decision]]:
    for node, decision in zip(plan.program.nodes, plan.decisions, strict=True):
        yield plan, node, decision
        for inner in decision.plans:
            yield from _decisions(inner)


def _is_divided(layout: Layout) -> bool:
    return isinstance(innermost(layout), Divided)


def _digest(plan: Plan) -> str:
    digest = hashlib.sha256()
    for owner, node, decision in _decisions(plan):
        results = [(owner.values[number].layout, owner.values[number].shape) for number in node.outputs]
        digest.update(repr((node.type, decision.operands, results)).encode())
    return digest.hexdigest()
