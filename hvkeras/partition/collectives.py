"""Collectives: what the ranks' functions exchange, and the collectives of ranks that one process simulates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import tensorflow as tf

Lanes: TypeAlias = "list[tf.Tensor]"
"""A tensor of each rank whose function is in this graph."""


class Collectives(Protocol):
    """Operations in which all ranks take part, in the same order.

    A graph may hold the functions of several ranks side by side: so each tensor is a list, of those ranks' tensors.
    Where ranks have graphs of their own, these operations are to be stateful: then TensorFlow runs them in the order in
    which they were created, and on no rank those behind an assertion that fails.
    """

    @property
    def are_compiled(self) -> bool:
        """Whether XLA can compile sums, and what rank 0 sends."""

    def reduce(self, reduction: str, tensors: Sequence[Lanes]) -> list[Lanes]:
        """Return the sums, maxima or minima over all ranks of each tensor, in one round.

        Args:
            reduction: "sum", "max" or "min".
            tensors: The tensors; the shapes of each are the same on all ranks.
        """

    def gather(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """Return the concatenation over all ranks of each tensor, in one round.

        Args:
            tensors: The tensors, which may differ in their first dimension. Strings are gathered, too, where they must
                be whole; collectives that carry only numbers have to encode them, or refuse.
        """

    def of_first(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """Return the tensors of rank 0, in one round.

        Args:
            tensors: The tensors; the shapes of each are the same on all ranks.
        """


class Simulated:
    """Collectives of ranks whose functions are all in one graph.

    Args:
        are_compiled: Whether XLA compiles them with the function that it compiles.
    """

    def __init__(self, are_compiled: bool = False) -> None:
        self.are_compiled: bool = are_compiled

    def reduce(self, reduction: str, tensors: Sequence[Lanes]) -> list[Lanes]:
        """See `Collectives.reduce`."""
        combine = {"sum": tf.add_n, "max": lambda lanes: tf.reduce_max(tf.stack(lanes), 0),
                   "min": lambda lanes: tf.reduce_min(tf.stack(lanes), 0)}[reduction]
        return [[combine(lanes)] * len(lanes) for lanes in tensors]

    def gather(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """See `Collectives.gather`."""
        return [[tf.concat(lanes, 0)] * len(lanes) for lanes in tensors]

    def of_first(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """See `Collectives.of_first`."""
        return [[lanes[0]] * len(lanes) for lanes in tensors]
