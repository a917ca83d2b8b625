"""Interface of updates, which apply reduced gradients, and Keras's own update; see `step.choose_update`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvkeras import compat
from hvkeras.diagnostics import spans
from hvkeras.gradients.options import Options
from hvkeras.gradients.reducer import ShardAssignment

Apply = Callable[..., Any]  # applies gradients to its variables, or to those in the second argument


class Update(Protocol):
    """Application of the reduced gradients of one step, eagerly or in the function under construction."""

    @property
    def text(self) -> str:
        """Description that must be equal on all ranks, for the plan of the gradients; "" for none."""
        ...

    @property
    def shares(self) -> ShardAssignment | None:
        """Parts of the gradients that this rank applies; None if it applies all."""
        ...

    def apply(self, reduced: Sequence[Any]) -> Any:
        """Apply reduced gradients; return the optimizer's result."""
        ...


@dataclass(frozen=True)
class DenseUpdate:
    """Replacement of Keras's loop over the variables with dense gradients.

    Attributes:
        update: Function of their gradients, which updates them.
        decays: Whether it also applies weight decay.
    """

    keys: Sequence[Any]
    update: Callable[..., None]
    decays: bool

    def others(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that Keras updates."""
        return [variable for variable in variables if compat.variable_key(variable) not in self.keys]


@dataclass(frozen=True)
class PlainUpdate:
    """Keras's own update. While it is applied, the optimizer replaces parts of Keras's step as specified here.

    Attributes:
        outer: The outermost optimizer: `optimizer`, or the `LossScaleOptimizer` around it.
        options: The options of the distributed optimizer.
        finish: Applies gradients to the variables, as the optimizer would if it were not distributed.
        dense: Replacement of Keras's loop over variables; None for that loop.
        clip: Replacement of Keras's clipping of gradients; None for Keras's clipping.
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
        """True if a `LossScaleOptimizer` may skip the step."""
        return self.outer is not self.optimizer or self.options.scales_loss

    def apply(self, reduced: Sequence[Any]) -> Any:
        """Apply reduced gradients with Keras."""
        with self.applying(reduced):
            return self.finish(list(reduced))

    @contextlib.contextmanager
    def applying(self, reduced: Sequence[Any]) -> Iterator[None]:
        """Enter a context for Keras's step, which uses this update's replacements, is recorded, and does not reduce."""
        name = self.options.exchange.name
        with spans.store().update(name, reduced, self.variables), compat.summed(self.optimizer, self):
            yield
