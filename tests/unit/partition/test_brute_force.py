"""What ranks compute of parts is what one process computes of the whole, for every layout of the operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import pytest
import tensorflow as tf

from hvkeras.partition.rules import RULES
from unit.partition.brute_force import batch, combinations
from unit.partition.cases import CASES, FAMILIES
from unit.partition.simulation import COMBINED, Traced, gathers, traced

SIZES, NUMBERS = (2, 3, 4), (12, 7, 2, 1)
MOST_OF_SAMPLE = 30


@pytest.fixture(autouse=True, scope="module")
def _without_optimizer() -> Iterator[None]:
    """Run graphs as they are: to optimize each of them takes longer than to run it."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_layouts(family: str):
    wrong: dict[str, str] = {}
    names = [f"{family}: {name}" for name in FAMILIES[family]]
    for name in names[:: 1 + len(names) // MOST_OF_SAMPLE]:
        case = CASES[name]
        plans = traced(name).plans(RULES, combinations(case, at_most=3))
        try:
            assert traced(name).compare(plans, [3])
            assert gathers(plans[batch(case)]) == case.gathers, "a batch is gathered, or is not"
        except Exception as error:  # noqa: BLE001 - all cases of a family are tried
            wrong[name] = f"{error} {error.__cause__ or ''}"
    assert not wrong


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        pytest.param([3], (7, 1), id="uneven rows", marks=pytest.mark.slow),
        pytest.param(SIZES, NUMBERS, id="all", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_all_layouts(name: str, sizes: Sequence[int], numbers: tuple[int, ...]):
    case = Traced(CASES[name], numbers)
    plans = case.plans(RULES, combinations(CASES[name]))
    assert case.compare(plans, sizes) == len(plans) * len(sizes) * len(numbers) * len(case.whole.graph.outputs)
    assert case.compare(case.plans(RULES, [batch(CASES[name])], is_resolved=True), [3])


@pytest.mark.nightly
@pytest.mark.parametrize("number", [4, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_number_of_rows_that_is_known_when_a_function_is_traced(name: str, number: int):
    case = Traced(CASES[name], [number], is_static=True)
    assert case.compare(case.plans(RULES, combinations(CASES[name], at_most=8)), [3])


def test_every_type_with_a_rule_has_a_case():
    found = set[str]().union(*(traced(name).types for name in CASES))
    assert not [type_ for type_ in RULES if COMBINED.get(type_, type_) not in found]


def test_all_layouts_are_many():
    assert sum(len(combinations(case)) for case in CASES.values()) * prod((len(SIZES), len(NUMBERS))) > 50_000
