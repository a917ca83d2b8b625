"""Sizes of dimensions: numbers, and polynomials in the numbers of rows of the sources of data.

A number of rows is a symbol: it stands for any number from 0 on, and equals no other size. What is decided about sizes
holds for all numbers of rows, or is not decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeAlias

import numpy as np

_Monomial: TypeAlias = tuple[tuple[str, int], ...]  # symbols and their powers, sorted
_Terms: TypeAlias = dict[_Monomial, int]


class Polynomial:
    """A polynomial with integer coefficients that is not a number; equal ones compare equal.

    Sums, differences and products with integers and other polynomials are integers where no symbol is left.
    """

    __slots__ = ("terms",)
    __array_ufunc__ = None  # of a NumPy integer and a polynomial, this class computes the result

    def __init__(self, terms: Iterable[tuple[_Monomial, int]]) -> None:
        self.terms: tuple[tuple[_Monomial, int], ...] = tuple(sorted(terms))

    @property
    def symbols(self) -> set[str]:
        """Symbols that occur."""
        return {symbol for monomial, _ in self.terms for symbol, _ in monomial}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)

    def __bool__(self) -> bool:
        raise TypeError("Whether a size that depends on rows is zero is not known")

    def __add__(self, other: Size) -> Size:
        terms = dict(self.terms)
        for monomial, factor in _terms_of(other).items():
            terms[monomial] = terms.get(monomial, 0) + factor
        return _size_of(terms)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + other * -1

    def __rsub__(self, other: Size) -> Size:
        return self * -1 + other

    def __mul__(self, other: Size) -> Size:
        terms: _Terms = {}
        for mine, factor in self.terms:
            for its, its_factor in _terms_of(other).items():
                product = _product(mine, its)
                terms[product] = terms.get(product, 0) + factor * its_factor
        return _size_of(terms)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return " + ".join("*".join([*([str(factor)] if factor != 1 or not monomial else []),
                                    *(symbol if power == 1 else f"{symbol}^{power}" for symbol, power in monomial)])
                          for monomial, factor in reversed(self.terms))


Size: TypeAlias = "int | Polynomial"
"""Size of a dimension; a size that is not known is None."""

Shape: TypeAlias = "tuple[Size | None, ...]"
"""Sizes of the dimensions of a tensor."""


def rows(symbol: str) -> Polynomial:
    """Return the number of rows of a source of data.

    Args:
        symbol: Name of the source.
    """
    return Polynomial([(((symbol, 1),), 1)])


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def quotient(dividend: Size, divisor: Size) -> Size | None:
    """Return the exact quotient of two sizes; None where there is none for all numbers of rows."""
    remainder, divisor_terms = _terms_of(dividend), _terms_of(divisor)
    if not divisor_terms:
        return None
    leading = min(divisor_terms, key=_rank)
    result: _Terms = {}
    while remainder:
        monomial = min(remainder, key=_rank)
        factor, rest = divmod(remainder[monomial], divisor_terms[leading])
        power = _without(monomial, leading)
        if rest or power is None:
            return None
        result[power] = factor
        for other, its_factor in divisor_terms.items():
            product_ = _product(power, other)
            left = remainder.get(product_, 0) - factor * its_factor
            remainder[product_] = left
            if not left:
                del remainder[product_]
    return _size_of(result)


def is_at_least(size: Size, other: Size) -> bool:
    """Return whether a size is at least another one for all numbers of rows; False where this is not known."""
    return all(factor >= 0 for factor in _terms_of(size - other).values())


def value_of(size: Size, numbers: Mapping[str, int]) -> int:
    """Return the value of a size.

    Args:
        size: The size.
        numbers: The number of rows of each symbol.
    """
    total = 0
    for monomial, factor in _terms_of(size).items():
        total += factor * prod(numbers[symbol] ** power for symbol, power in monomial)
    return total


def _terms_of(size: Size) -> _Terms:
    if isinstance(size, Polynomial):
        return dict(size.terms)
    if not isinstance(size, int | np.integer):
        raise TypeError(f"A size must be an integer or a polynomial. Received: size={size!r}")
    return {(): int(size)} if size else {}


def _size_of(terms: _Terms) -> Size:
    left = {monomial: factor for monomial, factor in terms.items() if factor}
    return Polynomial(left.items()) if any(left) else left.get((), 0)


def _product(one: _Monomial, other: _Monomial) -> _Monomial:
    powers = dict(one)
    for symbol, power in other:
        powers[symbol] = powers.get(symbol, 0) + power
    return tuple(sorted(powers.items()))


def _without(monomial: _Monomial, divisor: _Monomial) -> _Monomial | None:
    powers = dict(monomial)
    for symbol, power in divisor:
        powers[symbol] = powers.get(symbol, 0) - power
    if any(power < 0 for power in powers.values()):
        return None
    return tuple(sorted((symbol, power) for symbol, power in powers.items() if power))


def _rank(monomial: _Monomial) -> tuple[int, list[str]]:
    """Place of a monomial in the graded lexicographic order, the leading one first; products keep this order."""
    factors = [symbol for symbol, power in monomial for _ in range(power)]
    return -len(factors), factors
