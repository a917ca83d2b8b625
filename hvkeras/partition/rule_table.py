"""The table of rules: for each type of operation, how it may be divided; the files of `rules` fill it."""

from __future__ import annotations

from collections.abc import Callable

from hvkeras.partition.decisions import Call, Decision, Rule
from hvkeras.partition.patterns import SHAPE, Pattern, fit

RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of types of operations.

    Args:
        types: Types of operations.
    """
    def register(function: Rule) -> Rule:
        for type_ in types:
            if type_ in RULES:
                raise AssertionError(f"A type of operation must have one rule. Received: type={type_}")
            RULES[type_] = function
        return function
    return register


def pattern(types: str, written: str, reduction: str | None = None, linear: str | tuple[int, ...] = ()) -> None:
    """Give types of operations a pattern.

    Args:
        types: Types of operations, with blanks between them.
        written: The pattern; see `hvkeras.partition.patterns`.
        reduction: See `hvkeras.partition.patterns.Pattern`.
        linear: The same.
    """
    @rule(*types.split())
    def _pattern(call: Call) -> Pattern | Decision | None:
        return fitted(call, written, reduction, linear)


def fitted(call: Call, written: str, reduction: str | None = None, linear: str | tuple[int, ...] = ()
           ) -> Pattern | None:
    """Return a pattern fitted to an operation.

    Args:
        call: The operation.
        written: The pattern; see `hvkeras.partition.patterns`.
        reduction: See `hvkeras.partition.patterns.Pattern`.
        linear: The same.
    """
    found = fit(written, [value.shape for value in call.operands], len(call.operation.outputs), reduction, linear)
    if found is None:
        return None
    shapes = [None if output.shape.rank is None else output.shape.as_list() for output in call.operation.outputs]
    if SHAPE in found.operands:
        sizes = call.sizes(found.operands.index(SHAPE))
        shapes[0] = shapes[0] if sizes is None else sizes.tolist()
    for letters, shape in zip(found.results, shapes, strict=True):
        for letter, size in zip(letters, shape or (None,) * len(letters), strict=True):
            if found.sizes.get(letter) is None:
                found.sizes[letter] = size
    return found
