"""Mutants: rules that are made wrong, in one way each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras.partition.decisions import Call, Decision, Own, Rule, Value, by_pattern
from hvkeras.partition.layouts import REPLICATED, Divided, Layout, Partial
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.sizes import Polynomial
from hvkeras.partition.units import Units

OTHER_REDUCTIONS = {"sum": "max", "max": "min", "min": "max", None: "sum"}


def wider(_call: Call, pattern: Pattern) -> Pattern:
    """What must be whole may be divided."""

    def renamed(letters: Any) -> Any:
        return (
            letters
            if isinstance(letters, str)
            else tuple(
                f"w{letter.lower()}" if letter is not None and letter[0].isupper() else letter for letter in letters
            )
        )

    return replace(
        pattern,
        operands=tuple(map(renamed, pattern.operands)),
        results=tuple(map(renamed, pattern.results)),
        sizes=pattern.sizes | dict(zip(renamed(tuple(pattern.sizes)), pattern.sizes.values(), strict=True)),
    )


def other_reduction(_call: Call, pattern: Pattern) -> Pattern:
    """Parts of results are put together in another way."""
    return replace(pattern, reduction=OTHER_REDUCTIONS[pattern.reduction])


def more_linear(_call: Call, pattern: Pattern) -> Pattern:
    """The results are a linear function of more, or of other operands."""
    return replace(pattern, linear={"each": "jointly", "jointly": "each"}.get(str(pattern.linear), "each"))


def nothing_own(_call: Call, pattern: Pattern) -> Pattern:
    """A rank is given the sizes of the whole."""
    return replace(pattern, own=None)


def swapped(_call: Call, pattern: Pattern) -> Pattern:
    """The first two dimensions of results are swapped."""
    return replace(pattern, results=tuple((*letters[:2][::-1], *letters[2:]) for letters in pattern.results))


def _results(change: Callable[[Layout, Value], Layout | None]) -> Callable[[Call, Decision], Decision]:
    def mutation(_call: Call, decision: Decision) -> Decision:
        return replace(
            decision,
            results=tuple(
                replace(value, layout=change(value.layout, value) or value.layout) for value in decision.results
            ),
        )

    return mutation


def _operands(change: Callable[[Layout, Layout], Layout]) -> Callable[[Call, Decision], Decision]:
    def mutation(call: Call, decision: Decision) -> Decision:
        return replace(
            decision,
            operands=tuple(
                change(value.layout, needed) for value, needed in zip(call.operands, decision.operands, strict=True)
            ),
        )

    return mutation


def sizes_of_the_whole(_call: Call, decision: Decision) -> Decision:
    """A rank is given the number of all rows in place of its own."""
    return replace(
        decision,
        vectors={
            operand: tuple(entry.division.total * entry.times if isinstance(entry, Own) else entry for entry in entries)
            for operand, entries in decision.vectors.items()
        },
    )


def plainly(_call: Call, decision: Decision) -> Decision:
    """Each rank carries out the operation itself, with its parts."""
    return replace(decision, create=None, create_together=None if not decision.plans else decision.create_together)


def other_shape(_call: Call, decision: Decision) -> Decision:
    """Results have more elements than they have."""
    return replace(
        decision,
        results=tuple(
            replace(
                value,
                shape=value.shape and tuple(size + 1 if isinstance(size, Polynomial) else size for size in value.shape),
            )
            for value in decision.results
        ),
    )


class Together:
    """What ranks do together, made wrong.

    Args:
        create: What they do.
        kind: In which way it is made wrong.
    """

    def __init__(self, create: Callable[..., Any], kind: str) -> None:
        self._create, self._kind = create, kind
        self.differs: bool = False

    def __call__(self, emission: Any, *given: Any) -> Any:
        """Do it."""
        wrong = copy.copy(emission)
        if self._kind == "no collective":
            wrong.collectives = self
        else:
            wrong.units = [_wrong_units(units, self, self._kind) for units in emission.units]
        return self._create(wrong, *given)

    def _own(self, *given: Any) -> Any:
        self.differs = True
        return given[-1]

    gather = of_first = reduce = _own


def _wrong_units(units: Units, together: Together, kind: str) -> Units:
    def counted(_division: Any) -> tf.Tensor:
        together.differs = True
        return tf.constant(1, tf.int64)

    def masked(tensor: tf.Tensor, _division: Any) -> tf.Tensor:
        together.differs = True
        return tensor

    wrong = copy.copy(units)
    vars(wrong).update({"counted": counted} if kind == "ranks count equally" else {"masked": masked})
    return wrong


PATTERNS: dict[str, Callable[[Call, Pattern], Pattern]] = {
    "divides what must be whole": wider,
    "reduces otherwise": other_reduction,
    "linear in more": more_linear,
    "gives no own sizes": nothing_own,
    "swaps dimensions": swapped,
}

DECISIONS: dict[str, Callable[[Call, Decision], Decision]] = {
    "divided result whole": _results(lambda layout, _: REPLICATED if isinstance(layout, Divided) else None),
    "partial result whole": _results(lambda layout, _: REPLICATED if isinstance(layout, Partial) else None),
    "partial result otherwise": _results(
        lambda layout, _: (
            replace(layout, reduction=OTHER_REDUCTIONS[layout.reduction]) if isinstance(layout, Partial) else None
        )
    ),
    "copied rows count": _results(
        lambda layout, _: replace(layout, division=None) if isinstance(layout, Partial) else None
    ),
    "next axis": _results(
        lambda layout, value: (
            layout.at((layout.axis + 1) % len(value.shape or (1,))) if isinstance(layout, Divided) else None
        )
    ),
    "blocks and elements swapped": _results(
        lambda layout, _: replace(layout, outer=layout.each, each=layout.outer) if isinstance(layout, Divided) else None
    ),
    "part in place of whole": _operands(
        lambda layout, needed: layout if isinstance(layout, Divided) and needed == REPLICATED else needed
    ),
    "partial sum in place of sum": _operands(
        lambda layout, needed: layout if isinstance(layout, Partial) and needed == REPLICATED else needed
    ),
    "whole in place of part": _operands(lambda _, needed: REPLICATED if isinstance(needed, Divided) else needed),
    "sizes of the whole": sizes_of_the_whole,
    "the operation itself": plainly,
    "more rows": other_shape,
}

TOGETHER = ("no collective", "ranks count equally", "copied rows are summed")


class Mutant:
    """Rules, one of which is wrong.

    Args:
        rules: The rules.
        type_: The type whose rule is made wrong.
        kind: In which way.
    """

    def __init__(self, rules: Mapping[str, Rule], type_: str, kind: str) -> None:
        self._rule, self._kind = rules[type_], kind
        self._together: list[Together] = []
        self.is_planned: bool = False
        self.rules: dict[str, Rule] = {**rules, type_: self._wrong}

    @property
    def differs(self) -> bool:
        """Whether it has done something else than the rule does."""
        return self.is_planned or any(together.differs for together in self._together)

    def _wrong(self, call: Call) -> Pattern | Decision | None:
        found = self._rule(call)
        if found is None:
            return None
        right = by_pattern(call, found) if isinstance(found, Pattern) else found
        if self._kind in TOGETHER:
            if right.create_together is None:
                return found
            self._together.append(Together(right.create_together, self._kind))
            return replace(right, create_together=self._together[-1])
        if self._kind in DECISIONS:
            wrong = DECISIONS[self._kind](call, right)
        elif isinstance(found, Pattern):
            wrong = by_pattern(call, PATTERNS[self._kind](call, found))
        else:
            return found
        differs = [(decision.operands, decision.results, dict(decision.vectors)) for decision in (right, wrong)]
        if differs[0] == differs[1] and (
            self._kind in PATTERNS or (right.create, right.create_together) == (wrong.create, wrong.create_together)
        ):
            return found
        self.is_planned = True
        return wrong
