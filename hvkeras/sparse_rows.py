"""Rows of sparse gradients that several ranks have: one row where one process would have one.

What a loss does with a row decides what one process has on the whole batch. Lookups that take each row once
(`tf.nn.embedding_lookup_sparse`, and so dense layers on sparse inputs) have one row with the sum; others (`tf.gather`,
and so `Embedding`) have as many rows as lookups, and Keras 3's optimizers take them one by one. So rows of ranks are
summed in the first case, and only put together in the second (docs/decisions/rows-of-sparse-gradients.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_SAME_ELEMENTS = ("Reshape", "Identity", "Cast")
_DISTINCT = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")


def distinct_by_construction(indices: Any) -> bool:
    """Whether a graph makes indices in such a way that none comes twice.

    Args:
        indices: A symbolic tensor.
    """
    made_by = indices.op
    while made_by.type in _SAME_ELEMENTS:
        made_by = made_by.inputs[0].op
    return made_by.type in _DISTINCT


def distinct(everyones: Sequence[Any]) -> Any:
    """Which of several indices hold none twice; eager code does not tell how they were made.

    Args:
        everyones: One-dimensional eager tensors.

    Returns:
        int32, [1, number of tensors], 0 or 1: a row for each rank, where it is gathered.
    """
    return tf.constant([[int(len(set(indices.numpy().tolist())) == indices.shape[0]) for indices in everyones]])


def summed(slices: Any) -> Any:
    """Sums the values that have the same index.

    Args:
        slices: `tf.IndexedSlices`.

    Returns:
        `tf.IndexedSlices` with each index once, in the order in which they come first.
    """
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)
