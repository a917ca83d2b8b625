"""A rule that is made wrong is noticed by the cases of its type."""

from __future__ import annotations

import pytest

from hvkeras.partition.rules import RULES
from unit.partition.brute_force import combinations
from unit.partition.cases import CASES
from unit.partition.mutants import DECISIONS, PATTERNS, TOGETHER, Mutant
from unit.partition.simulation import COMBINED, Traced, traced

MOST_CASES, MOST_LAYOUTS, OF_SAMPLE = 12, 12, 10

EQUIVALENT = {  # mutants that do nothing wrong: the way, the types, and why
    "copied rows count": ("All Any Max Min UnsortedSegmentMax UnsortedSegmentMin", "a copy changes no maximum"),
    "whole in place of part": ("Assert Shape ShapeN Size", "the operand is only shown, or not taken at all"),
    "partial sum in place of sum": ("ScaleAndTranslateGrad", "of the images, only their shape is taken"),
    "linear in more": (
        "Cast CheckNumerics CheckNumericsV2 IsInf IsNan MatrixDiagPartV2 MatrixDiagPartV3",
        "sums of multiples of 1/8 are not rounded; a sum is infinite if a part is; diagonals are as they were read",
    ),
    "blocks and elements swapped": ("OnesLike ZerosLike", "all elements are equal"),
    "the operation itself": (
        "EnsureShape NonDeterministicInts Squeeze Timestamp",
        "differs only where the number of rows is known when a function is traced, or from one draw to the next",
    ),
}


def cases_of(type_: str) -> list[Traced]:
    """Return cases in which a type occurs, those of its name and short ones first."""
    names = [name for name in CASES if COMBINED.get(type_, type_) in traced(name).types]
    names.sort(key=lambda name: (type_ not in name.split(": ")[1].replace(",", "").split(), len(traced(name).types)))
    return [traced(name) for name in names[:MOST_CASES]]


def is_noticed(type_: str, kind: str) -> bool | None:
    """Return whether a case notices a mutant; None if there is no such mutant: it does what the rule does."""
    exists = False
    for case in cases_of(type_):
        mutant, plans = Mutant(RULES, type_, kind), {}
        for layouts in combinations(case.case, MOST_LAYOUTS):
            mutant.is_planned = False
            try:
                plan = case.plans(mutant.rules, [layouts])
                if mutant.is_planned or kind in TOGETHER:
                    plans.update(plan)
            except Exception:  # noqa: BLE001 - whatever it breaks
                return True
        exists = exists or (bool(plans) and kind not in TOGETHER)
        try:
            case.compare(plans, [3])
        except Exception:  # noqa: BLE001 - the same
            return True
        exists = exists or mutant.differs
    return False if exists else None


@pytest.mark.parametrize(
    "type_",
    [
        pytest.param(type_, marks=pytest.mark.nightly if number % OF_SAMPLE else pytest.mark.slow)
        for number, type_ in enumerate(sorted(RULES))
    ],
)
def test_a_wrong_rule_is_noticed(type_: str):
    found = {kind: is_noticed(type_, kind) for kind in [*PATTERNS, *DECISIONS, *TOGETHER]}
    assert {kind for kind, noticed in found.items() if noticed is False} == {
        kind for kind, (types, _) in EQUIVALENT.items() if type_ in types.split()
    }
