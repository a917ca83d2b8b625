"""The functions that an update is compiled into: one for each kind of variable, or one for all variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras import compat
from hvkeras.compat.compiling import CompiledFunction

Specs = Mapping[int, Any]  # the `tf.TensorSpec` of each dense gradient, by its place
UpdateOfOne = Callable[..., None]  # takes a gradient and its `variable`


@dataclass(frozen=True)
class Piece:
    """A function, and its calls in a step.

    Attributes:
        function: The function.
        calls: For each call the places of the gradients that it takes, and the handles of the variables that it is for:
            by the ids of those that the function was traced with.
        is_of_one: Whether each call updates one variable, and decays it.
    """

    function: CompiledFunction
    calls: Sequence[tuple[Sequence[int], Mapping[int, Any]]]
    is_of_one: bool = False

    @property
    def size(self) -> int:
        """The number of operations that its calls replace."""
        return self.function.size * len(self.calls)

    @property
    def traffic(self) -> float:
        """The bytes that these operations would write."""
        return self.function.traffic * len(self.calls)


def whole(update: Callable[..., Any], specs: Specs) -> list[Piece]:
    """Traces the update of all variables as one function.

    Args:
        update: Takes the gradients, in the order of `specs`.
        specs: The gradients.

    Raises:
        Exception: Whatever the optimizer raises.
    """
    return [Piece(CompiledFunction(update, list(specs.values())), [(list(specs), {})])]


def by_kind(update: UpdateOfOne, optimizer: Any, specs: Specs, variables: Sequence[Any]) -> list[Piece] | None:
    """Traces the update of one variable of each kind; variables of one shape and dtype are one kind.

    There are fewer functions to compile than variables, and a variable is updated as soon as its own gradient is
    reduced, while that is still in the processor's cache and others are on their way.

    Args:
        update: Updates one variable.
        optimizer: The optimizer, built.
        specs: The gradients.
        variables: The variables, by the same places.

    Returns:
        A piece for each kind; None if variables have to do with each other.

    Raises:
        Exception: Whatever the optimizer raises.
    """
    groups = {place: compat.with_slots(optimizer, variables[place]) for place in specs}
    owners = {id(one.handle): place for place, group in groups.items() for one in group if one is not None}
    kinds: dict[Any, list[int]] = {}
    for place, spec in specs.items():
        shapes = tuple(None if one is None else (one.dtype, tuple(one.shape)) for one in groups[place])
        kinds.setdefault((spec, shapes, compat.is_decayed(optimizer, variables[place])), []).append(place)
    pieces = []
    for (spec, *_), places in kinds.items():
        first = places[0]
        function = CompiledFunction(functools.partial(update, variable=groups[first][0]), [spec])
        if any(owners.get(id(one), first) != first for one in function.captured):
            return None
        pieces.append(Piece(function, [([place], _instead(groups[first], groups[place])) for place in places],
                            is_of_one=True))
    return pieces


def _instead(first: Sequence[Any], own: Sequence[Any]) -> dict[int, Any]:
    """Returns the handles of a variable and its slots, by the ids of those of the first variable of its kind."""
    return {id(old.handle): new.handle for old, new in zip(first, own, strict=True) if old is not None}
