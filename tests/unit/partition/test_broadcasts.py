"""Copies that need not be made are not; that results are right all the same is what the brute force shows."""

from __future__ import annotations

import pytest

from hvkeras.partition.rules import RULES
from unit.partition.brute_force import batch
from unit.partition.cases import CASES
from unit.partition.simulation import traced

MADE = {
    "product with copies of a row": 0,
    "product with copies of a column": 0,
    "copies that meet numbers": 0,
    "copies that meet copies": 2,
    "copies that are a result as well": 1,
    "copies of which one use is of another kind": 1,
    "sum of copies and others": 0,
    "sum of copies": 2,
    "copies that meet what broadcasts": 2,
    "gradient of moments": 0,
    "gradient of a mean of rows": 0,
    "gradient of a mean over rows": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "made"), MADE.items())
def test_copies_are_made_only_where_they_are_needed(name: str, made: int):
    name = f"broadcasts: {name}"
    plan = traced(name).plans(RULES, [batch(CASES[name])])[batch(CASES[name])]
    copies = [node.operation.name for node, decision, live in zip(
        plan.program.nodes, plan.decisions, plan.live, strict=True)
        if live and node.type in ("BroadcastTo", "Tile") and decision.create is None]
    assert len(copies) == made, copies
