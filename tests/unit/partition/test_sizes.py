"""Sizes are compared, multiplied and divided for all numbers of rows at once."""

from __future__ import annotations

import random

import pytest

from hvkeras.partition.sizes import Size, is_at_least, product, quotient, rows, value_of

B, C = rows("b"), rows("c")


def polynomial(generator: random.Random) -> Size:
    """Return a random polynomial."""
    size: Size = generator.randrange(-3, 4)
    for _ in range(3):
        size = size + generator.randrange(-3, 4) * product(generator.choice([B, C, 1]) for _ in range(2))
    return size


def test_arithmetic_agrees_with_that_of_numbers() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        one, other = polynomial(generator), polynomial(generator)
        numbers = {"b": generator.randrange(9), "c": generator.randrange(9)}
        value, its_value = value_of(one, numbers), value_of(other, numbers)
        assert value_of(one * other - one + other, numbers) == value * its_value - value + its_value
        assert not is_at_least(one, other) or value >= its_value
        exact = quotient(one, other)
        assert exact is None or exact * other == one
        if other != 0:
            assert quotient(one * other, other) == one


@pytest.mark.parametrize(
    ("size", "other", "result"),
    [
        (B, 0, True),
        (B, 1, False),
        (B * B + 2, 2, True),
        (B + 3, 3, True),
        (B * C, C, False),
        (B, C, False),
        (4, 4, True),
        (B * 2, B, True),
        (B * 2 - 1, B, False),
        (B - 1, 0, False),
    ],
)
def test_comparisons_hold_for_all_numbers_of_rows_from_0_on(size: Size, other: Size, result: bool) -> None:
    assert is_at_least(size, other) is result


def test_rows_equal_no_number_and_no_other_rows() -> None:
    assert B != 64
    assert B != C
    assert rows("b") == B
    assert B - B == 0
    assert quotient(B * 6, 4) is None
    assert quotient(0, B) == 0
    assert quotient(B, 0) is None
    assert str(B * 2 + 1) == "2*b + 1"
    with pytest.raises(TypeError, match="is not known"):
        bool(B)
