"""Which combinations of launcher, engine, Keras and number of ranks are tested."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

# On the oldest TensorFlow in `make test`, and on the newest in `make test-soak`, where other runs make the same checks.
OLDEST_ALONE = (pytest.mark.oldest, pytest.mark.slow)


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Chooses few combinations in which each value of an axis meets each value of every other axis.

    Combinations are taken one by one, each time the first of those that bring most new pairs (after Cohen et al., "The
    AETG System", IEEE Transactions on Software Engineering 23, 1997).

    Example:
        >>> len(pairwise(("native", "tfdist", "horovod"), ("keras3", "tf_keras"), (2, 4)))
        6

    Args:
        axes: The values of each axis.

    Returns:
        Combinations, one value an axis each.
    """
    everything = list(itertools.product(*axes))
    missing = {pair for combination in everything for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: len(missing & _pairs(combination)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))
