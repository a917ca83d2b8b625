"""Which rank prints and writes for those that train a model together."""

from __future__ import annotations

from typing import Any

from hvkeras import context
from hvkeras.fit import shared_by


def leads(model: Any) -> bool:
    """Whether this rank is the first of those that train the model together; rank 0 as a rule."""
    process_set = shared_by(model)
    return context.current().topology.rank == (0 if process_set is None else process_set.ranks[0])
