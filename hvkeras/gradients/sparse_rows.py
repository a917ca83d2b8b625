"""Rows of sparse gradients that several ranks have: one row where one process would have one.

What a loss does with a row decides what one process has on the whole batch. Lookups that take each row once
(`tf.nn.embedding_lookup_sparse`, and so dense layers on sparse inputs) have one row with the sum; others (`tf.gather`,
and so `Embedding`) have as many rows as lookups, and Keras 3's optimizers take them one by one. So rows of ranks are
summed in the first case, and only put together in the second (docs/decisions/rows-of-sparse-gradients.md).
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from hvkeras.host.console import prints_at, say
from hvkeras.job.state import current_job

_SAME_ELEMENTS = ("Reshape", "Identity", "Cast")
_DISTINCT = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")


def as_in_one_process(gathered: Any, own_indices: Any) -> Any:
    """Sums the rows of all ranks that have the same index, where one process would have one row.

    Args:
        gathered: `tf.IndexedSlices` with all ranks' rows.
        own_indices: This rank's indices; in a graph they tell how they were made, in eager mode they do not, and rows
            stay as they are, with a warning if one process may have fewer.

    Returns:
        `tf.IndexedSlices`; with each index once, in the order in which they come first, if rows were summed.
    """
    if tf.executing_eagerly():
        _warn_of_rows_apart(gathered.indices, own_indices)
        return gathered
    if not _distinct(own_indices):
        return gathered
    indices, places = tf.unique(gathered.indices)
    values = tf.math.unsorted_segment_sum(gathered.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gathered.dense_shape)


def _warn_of_rows_apart(gathered: Any, own: Any) -> None:
    """Warns where rows of several ranks have one index, and each rank may have it once by construction."""

    def repeats(indices: Any) -> bool:
        return int(tf.size(tf.unique(indices)[0])) < int(tf.size(indices))

    if not repeats(own) and repeats(gathered):
        _say_rows_stay_apart()


@functools.cache
def _say_rows_stay_apart() -> None:
    job = current_job()
    if job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
        say("sparse gradients of several ranks have rows of the same index, and in eager mode they stay apart, so that"
            " Keras 3's optimizers take them one by one. If the model takes sparse inputs, or looks rows up by"
            " tf.nn.embedding_lookup_sparse, one process would have one row with their sum: pass sparse_as_dense=True,"
            " or put the step into a tf.function")


def _distinct(indices: Any) -> bool:
    """Whether a graph makes indices in such a way that none comes twice."""
    made_by = indices.op
    while made_by.type in _SAME_ELEMENTS:
        made_by = made_by.inputs[0].op
    return made_by.type in _DISTINCT
