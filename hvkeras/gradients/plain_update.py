"""Interface of updates, which apply reduced gradients, and the update of Keras itself; see `step.choose_update`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvkeras import compat
from hvkeras.diagnostics import spans
from hvkeras.gradients.options import Options
from hvkeras.gradients.reducer import ShardAssignment

Apply = Callable[..., Any]  # applies gradients to the variables that it was made for, or to those of a second argument


class Update(Protocol):
    """Applies the reduced gradients of one step, eagerly or in the function under construction."""

    @property
    def text(self) -> str:
        """What ranks must have in common about it, for the plan of the gradients; "" for nothing."""
        ...

    @property
    def shares(self) -> ShardAssignment | None:
        """The parts of the gradients that this rank applies; None if it applies all."""
        ...

    def apply(self, reduced: Sequence[Any]) -> Any:
        """Applies reduced gradients; returns what the optimizer does."""
        ...


@dataclass(frozen=True)
class DenseUpdate:
    """What is done instead of Keras's loop over the variables that have dense gradients.

    Attributes:
        keys: The keys of these variables.
        update: Takes their gradients.
        decays: Whether it decays the variables as well.
    """

    keys: Sequence[Any]
    update: Callable[..., None]
    decays: bool

    def others(self, variables: Sequence[Any]) -> list[Any]:
        """The variables that Keras updates itself."""
        return [variable for variable in variables if compat.variable_key(variable) not in self.keys]


@dataclass(frozen=True)
class PlainUpdate:
    """Keras's own update. While it is applied, those parts of Keras's step that can be replaced ask it what to do.

    Attributes:
        optimizer: The distributed optimizer.
        outer: The outermost optimizer: that one, or the `LossScaleOptimizer` around it.
        options: How the optimizer is distributed.
        variables: The variables.
        finish: Applies gradients to them, as the optimizer would if it were not distributed.
        dense: What is done instead of Keras's loop over variables; None for that loop.
        clip: Clips gradients instead of Keras; None for Keras's clipping.
        is_clipped: Whether the gradients are clipped before they are applied.
    """

    optimizer: Any
    outer: Any
    options: Options
    variables: Sequence[Any]
    finish: Apply
    dense: DenseUpdate | None = None
    clip: Callable[[list[Any]], list[Any]] | None = None
    is_clipped: bool = False
    text: str = ""
    shares: None = None

    @property
    def is_scaled(self) -> bool:
        """Whether a `LossScaleOptimizer` decides whether to skip the step."""
        return self.outer is not self.optimizer or self.options.scales_loss

    def apply(self, reduced: Sequence[Any]) -> Any:
        """Applies reduced gradients by Keras."""
        with self.applying(reduced):
            return self.finish(list(reduced))

    @contextlib.contextmanager
    def applying(self, reduced: Sequence[Any]) -> Iterator[None]:
        """A scope in which Keras's step asks this update what to do, and reduces nothing; it is recorded.

        Args:
            reduced: The gradients.
        """
        name = self.options.exchange.name
        with spans.store().update(name, reduced, self.variables), compat.summed(self.optimizer, self):
            yield
