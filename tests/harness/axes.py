"""Which combinations of launcher, engine, Keras and number of ranks are tested."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

# On the oldest TensorFlow in `make test`, and on the newest in `make test-soak`, where other runs make the same checks.
OLDEST_ALONE = (pytest.mark.oldest, pytest.mark.nightly)
# On the newest in `make test`, and on the oldest in `make test-soak` alone.
OLDEST_IN_SOAK = (pytest.mark.oldest, pytest.mark.oldest_nightly)


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


def some_cold(combinations: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Adds to each combination whether its ranks are cold (see `harness.warm`), where processes are the subject.

    Every value of every axis is met by cold ranks at least once: real processes under each launcher, on each engine, in
    each kind of failure; the other combinations, which add pairs alone, are warm. `make test` runs the warm ones, and
    `make test-all` the cold ones, too.

    Args:
        combinations: One value an axis each.

    Returns:
        The combinations as parameters of tests, each with one value more.
    """
    missing = {value for combination in combinations for value in enumerate(combination)}
    cold = set()
    while missing:
        best = max(combinations, key=lambda combination: len(missing & set(enumerate(combination))))
        cold.add(best)
        missing -= set(enumerate(best))
    return [pytest.param(*combination, combination in cold, marks=pytest.mark.slow if combination in cold else ())
            for combination in combinations]


def _pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))
