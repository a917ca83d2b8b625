"""Gradients that a loop of the user's had reduced before it applies them: the step must not reduce them again."""

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
        graph: The function in which that was, as a weak reference; None for eager mode.
        due: Whether it is to be applied, as a tensor; None where it always is.
        computed: Whether it was reduced as it was computed.
    """

    graph: Any
    due: Any
    computed: bool


class ReducedAhead:
    """The variables of one optimizer whose gradients are reduced, and not applied yet."""

    def __init__(self) -> None:
        self._ahead: dict[Any, Ahead] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedAhead:
        """A copied optimizer has none."""
        return ReducedAhead()

    def __reduce__(self) -> Any:
        return ReducedAhead, ()

    def note(self, variables: Sequence[Any], due: Any, computed: bool) -> None:
        """Notes that gradients are reduced in the function under construction, or in eager mode."""
        graph = graphs.function_graph()
        ahead = Ahead(None if graph is None else weakref.ref(graph), due, computed)
        self._ahead.update((compat.variable_key(variable), ahead) for variable in variables)

    def find(self, variables: Sequence[Any]) -> Ahead | None:
        """How the gradients of all these variables were reduced here; None where any was not."""
        graph = graphs.function_graph()
        found = [self._ahead.get(compat.variable_key(variable)) for variable in variables] if self._ahead else []
        here = [ahead for ahead in found if ahead is not None and (ahead.graph and ahead.graph()) is graph]
        return here[0] if here and len(here) == len(found) else None

    def take(self, variables: Sequence[Any]) -> Ahead | None:
        """The same, and forgets it: the gradients are being applied."""
        found = self.find(variables)
        if found is not None:
            for variable in variables:
                del self._ahead[compat.variable_key(variable)]
        return found
