"""Rules of types of operations, by families."""

from __future__ import annotations

from hvkeras.partition.rule_table import RULES
from hvkeras.partition.rules import (
    batch_normalization,
    contractions,
    control_flow,
    convolutions,
    elementwise,
    indexing,
    linear_algebra,
    lists,
    lookups,
    normalization,
    random,
    reductions,
    shapes,
    sources,
    sparse,
    state,
    strings,
)

__all__ = [
    "RULES",
    "batch_normalization",
    "contractions",
    "control_flow",
    "convolutions",
    "elementwise",
    "indexing",
    "linear_algebra",
    "lists",
    "lookups",
    "normalization",
    "random",
    "reductions",
    "shapes",
    "sources",
    "sparse",
    "state",
    "strings",
]
