"""Patterns: which dimensions of operands and results of an operation belong together.

A pattern has a letter for each dimension, as in an Einstein summation. The operation does the same for each index of a
lower-case letter, so that each rank may do it for its own: `"mk,kn->mn"` (a product of matrices) may be divided along
m, n, or k. Where no result has the letter of the divided dimension, each rank has a part of the results: their sum,
maximum or minimum over all ranks is the result.

| in a pattern | means |
| --- | --- |
| `b` | a dimension along which the operation may be divided |
| `C` | a dimension that each rank must have whole |
| `.` | in a result: a dimension of its own; whole |
| `*` | any number of dimensions `b`; those of several operands are broadcast |
| `#` | an operand that each rank must have whole, whatever its shape |
| `@` | an operand that is the shape of the first result |

A dimension of size 1 whose letter has another size elsewhere is broadcast: each rank has it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hvkeras.partition.layouts import Divided
from hvkeras.partition.sizes import Shape, Size

WHOLE, SHAPE = "#", "@"


@dataclass(frozen=True)
class Pattern:
    """A pattern that fits the shapes of an operation.

    Args:
        operands: The letters of each operand, a letter or None (broadcast) a dimension; or `"#"` or `"@"`.
        results: The letters of each result.
        sizes: Size of each letter, where it is known.
        reduction: How results are made of the ranks' parts where the divided dimension is in no result: "sum", "max",
            "min"; None if they cannot be.
        linear: Operands of which the results are a linear function, all together ("jointly", as of a sum), or each for
            itself ("each", as of a product); or the numbers of those that they are a linear function of, together.
        own: What operands each rank is given when a letter is divided, beside `"@"`, by their numbers.
    """

    operands: tuple[tuple[str | None, ...] | str, ...]
    results: tuple[tuple[str, ...], ...]
    sizes: dict[str, Size | None]
    reduction: str | None = None
    linear: str | tuple[int, ...] = ()
    own: Callable[[str, Divided], Mapping[int, Any]] | None = None

    def may_divide(self, letter: str | None) -> bool:
        """Return whether the operation may be divided along the dimensions of a letter."""
        if letter is None or not letter[0].islower():
            return False
        return all(letter in result for result in self.results) or (
            self.reduction is not None and not any(letter in result for result in self.results))

    def shape_of(self, result: int) -> Shape:
        """Return the shape of a result, of all ranks together."""
        return tuple(self.sizes.get(letter) for letter in self.results[result])


def fit(pattern: str, shapes: Sequence[Shape | None], results: int, reduction: str | None = None,
        linear: str | tuple[int, ...] = ()) -> Pattern | None:
    """Fit a pattern to the operands of an operation.

    Args:
        pattern: The pattern. If it has fewer operands than the operation, its last one stands for all further ones; the
            same is true of results.
        shapes: Shape of each operand; None if it is not known.
        results: How many results there are.
        reduction: See `Pattern`.
        linear: See `Pattern`.

    Returns:
        The fitted pattern; None if the shapes that it needs are not known, or do not fit.
    """
    written_operands, written_results = _parsed(pattern)
    written = _repeated(written_operands, len(shapes))
    leading = max((len(shape) + 1 - len(letters) for letters, shape in zip(written, shapes, strict=True)
                   if "*" in letters and shape is not None), default=0)
    fitted = [_fitted(letters, shape, leading) for letters, shape in zip(written, shapes, strict=True)]
    known = [names for names in fitted if names is not None]
    sizes = _sizes(known, shapes) if len(known) == len(fitted) else None
    if sizes is None:
        return None
    operands = tuple(names if isinstance(names, str) else tuple(
        None if size == 1 and sizes[name] != 1 else name for name, size in zip(names, shape or (), strict=True))
        for names, shape in zip(known, shapes, strict=True))
    return Pattern(operands, tuple(_names(letters, leading, leading, f".{number}.") for number, letters in enumerate(
        _repeated(written_results, results))), sizes, reduction, linear)


def _fitted(letters: str, shape: Shape | None, leading: int) -> tuple[str, ...] | str | None:
    """Return the name of each dimension of an operand; None if its shape does not fit."""
    if letters in (WHOLE, SHAPE):
        return letters
    names = () if shape is None else _names(letters, leading, len(shape) + 1 - len(letters))
    return names if shape is not None and len(names) == len(shape) else None


def _sizes(fitted: Sequence[tuple[str, ...] | str], shapes: Sequence[Shape | None]) -> dict[str, Size | None] | None:
    """Return the size of each name; None if dimensions of a name have sizes that do not fit."""
    sizes: dict[str, Size | None] = {}
    for names, shape in zip(fitted, shapes, strict=True):
        for name, size in () if isinstance(names, str) else zip(names, shape or (), strict=True):
            if name in sizes and not _may_be_equal(sizes[name], size):
                return None
            sizes[name] = _broadcast(sizes.get(name, 1), size)
    return sizes


def _may_be_equal(size: Size | None, other: Size | None) -> bool:
    return size is None or other is None or size == other or 1 in (size, other)


def _broadcast(size: Size | None, other: Size | None) -> Size | None:
    """Return the size of a dimension that two operands have; a size that is not known may be 1, as a number of rows."""
    known = size if other is None else other if size is None else None
    if known is not None:
        return known if known != 1 and isinstance(known, int) else None
    return other if size == 1 else size


def _repeated(written: tuple[str, ...], number: int) -> tuple[str, ...]:
    return (*written[:number], *written[-1:] * (number - len(written)))


def _names(letters: str, leading: int, dimensions: int, prefix: str = "") -> tuple[str, ...]:
    """Return the name of each dimension; `*` has names that agree from the right."""
    names: list[str] = []
    for position, letter in enumerate(letters):
        if letter == "*":
            names += [f"d{number}" for number in range(leading - dimensions, leading)]
        else:
            names.append(f"{prefix}{position}" if letter == "." else letter)
    return tuple(names)


@cache
def _parsed(pattern: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    operands, _, results = pattern.replace(" ", "").partition("->")
    return tuple(operands.split(",")), tuple(results.split(","))
