"""Tracks gradients that a training loop has reduced before applying them, so that they are not reduced again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras import compat
from hvkeras.compat import graphs


@dataclass(frozen=True)
class Ahead:
    """How a variable's gradient was reduced.

    Attributes:
        graph: A weak reference to the function graph in which the gradient was reduced; None for eager mode.
        due: A boolean tensor that says whether to apply the gradient; None if it is always applied.
        computed: Whether the gradient was reduced when it was computed.
    """

    graph: Any
    due: Any
    computed: bool


class ReducedAhead:
    """The variables of an optimizer whose gradients are reduced but not yet applied."""

    def __init__(self) -> None:
        self._ahead: dict[Any, Ahead] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedAhead:
        """A copied optimizer starts without such gradients."""
        return ReducedAhead()

    def __reduce__(self) -> Any:
        return ReducedAhead, ()

    def note(self, variables: Sequence[Any], due: Any, computed: bool) -> None:
        """Records that gradients are reduced, in the function under construction or in eager mode."""
        graph = graphs.function_graph()
        ahead = Ahead(None if graph is None else weakref.ref(graph), due, computed)
        self._ahead.update((compat.variable_key(variable), ahead) for variable in variables)

    def forget(self, variables: Sequence[Any]) -> None:
        """Forgets the entries of these variables: others are applied instead of the gradients that were reduced."""
        for variable in variables:
            self._ahead.pop(compat.variable_key(variable), None)

    def find(self, variables: Sequence[Any]) -> Ahead | None:
        """Returns how the gradients of these variables were reduced here, or None unless all of them were."""
        graph = graphs.function_graph()
        found = [self._ahead.get(compat.variable_key(variable)) for variable in variables] if self._ahead else []
        here = [ahead for ahead in found if ahead is not None and (ahead.graph and ahead.graph()) is graph]
        return here[0] if here and len(here) == len(found) else None

    def take(self, variables: Sequence[Any]) -> Ahead | None:
        """Does the same as `find`, and forgets the entries, because the gradients are being applied."""
        found = self.find(variables)
        if found is not None:
            for variable in variables:
                del self._ahead[compat.variable_key(variable)]
        return found
