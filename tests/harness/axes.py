"""Selection of the tested combinations of launcher, engine, Keras and number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

# Oldest TensorFlow: `make test`. Newest: `make test-soak`, because other tests there make the same checks.
OLDEST_ALONE = (pytest.mark.oldest, pytest.mark.nightly)
# Newest TensorFlow: `make test`. Oldest: only `make test-soak`.
OLDEST_IN_SOAK = (pytest.mark.oldest, pytest.mark.oldest_nightly)


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a small set of combinations in which each pair of values of two axes occurs.

    The greedy algorithm adds the combination with the most new pairs, the first one in case of a tie (after Cohen et
    al., "The AETG System", IEEE Transactions on Software Engineering 23, 1997).

    Example:
        >>> len(pairwise(("native", "tfdist", "horovod"), ("keras3", "tf_keras"), (2, 4)))
        6

    Args:
        axes: The values of each axis.

    Returns:
        Combinations with one value per axis.
    """
    candidates = list(itertools.product(*axes))
    missing = {pair for combination in candidates for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(candidates, key=lambda combination: len(missing & _pairs(combination)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def some_cold(combinations: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Append to each combination whether its ranks are cold (see `harness.warm`), for tests of processes.

    Each value of each axis occurs at least once with cold ranks: under each launcher, on each engine, with each kind of
    failure. The other combinations, which only add pairs, are warm. `make test` runs the warm ones, and `make test-all`
    also the cold ones.

    Args:
        combinations: Combinations with one value per axis.

    Returns:
        Test parameters with the additional value.
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
