"""Rows of sparse gradients that several ranks have: one row where one process would have one.

What a loss does with a row decides what one process has on the whole batch. Lookups that take each row once
(`tf.nn.embedding_lookup_sparse`, and so dense layers on sparse inputs) have one row with the sum; others (`tf.gather`,
and so `Embedding`) have as many rows as lookups, and Keras 3's optimizers take them one by one. So rows of ranks are
summed in the first case, and only put together in the second (docs/decisions/rows-of-sparse-gradients.md).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SAME_ELEMENTS = ("Reshape", "Identity", "Cast")
_DISTINCT = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")


def as_in_one_process(gathered: Any, own_indices: Any) -> Any:
    """Sums the rows of all ranks that have the same index, where one process would have one row.

    Args:
        gathered: `tf.IndexedSlices` with all ranks' rows.
        own_indices: This rank's indices; in a graph they tell how they were made, in eager mode they do not, and rows
            stay as they are.

    Returns:
        `tf.IndexedSlices`; with each index once, in the order in which they come first, if rows were summed.
    """
    if tf.executing_eagerly() or not _distinct(own_indices):
        return gathered
    indices, places = tf.unique(gathered.indices)
    values = tf.math.unsorted_segment_sum(gathered.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gathered.dense_shape)


def _distinct(indices: Any) -> bool:
    """Whether a graph makes indices in such a way that none comes twice."""
    made_by = indices.op
    while made_by.type in _SAME_ELEMENTS:
        made_by = made_by.inputs[0].op
    return made_by.type in _DISTINCT
