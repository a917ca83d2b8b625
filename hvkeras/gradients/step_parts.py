"""The parts of a step's gradients that this rank reduces and applies, where ranks share the update."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hvkeras.backends.capabilities import ReducesParts
from hvkeras.backends.interface import Backend
from hvkeras.gradients.parts import Bounds
from hvkeras.gradients.shards import Shards


class StepParts:
    """The parts of the gradients of one step, and the memory that is free once these are reduced.

    Args:
        shards: The variables and this rank's parts.
        numbers: The numbers of the step's variables among those; the gradients are in the same order.

    Attributes:
        memory: Tensors whose values nobody needs any more, by the numbers of the variables whose shape they have.
        reduced: The numbers of the variables whose gradients were reduced, in the order of the buckets.
    """

    def __init__(self, shards: Shards, numbers: Sequence[int]) -> None:
        self.shards: Shards = shards
        self._numbers = list(numbers)
        self.memory: dict[int, Any] = {}
        self.reduced: list[int] = []

    @property
    def text(self) -> str:
        """What all ranks must have dealt alike, for a plan."""
        bounds = str([self.shards.bounds[number] for number in self._numbers])
        return hashlib.sha256(bounds.encode()).hexdigest()[:8]

    def is_dealt(self, place: int) -> bool:
        """Whether ranks share the variable of a gradient, instead of each keeping its own."""
        return place < len(self._numbers) and self.shards.bounds[self._numbers[place]] is not None

    def bounds_for(self, places: Sequence[int], backend: Backend) -> tuple[Bounds, ...]:
        """The bounds of the gradients of a bucket; none if it is to be reduced as a whole."""
        found = tuple(self.shards.bounds[self._numbers[place]] or () for place in places if self.is_dealt(place))
        return found if found and isinstance(backend, ReducesParts) else ()

    def take(self, place: int, tensor: Any, gradient: Any) -> Any:
        """Takes this rank's part of a gradient.

        Args:
            place: The gradient's place.
            tensor: What was reduced, of which at least this rank's part is the result; or `tf.IndexedSlices`.
            gradient: The gradient as it was before, if it is dense.

        Returns:
            The part; None if this rank has none of it.
        """
        if not self.is_dealt(place):
            return tensor
        number = self._numbers[place]
        self.reduced.append(number)
        if gradient is not None:
            self.memory[number] = tensor if tensor.dtype == gradient.dtype else gradient
        return self.shards.cut(number, tensor) if self.shards.is_mine(number) else None
