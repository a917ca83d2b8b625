"""Duplicate rows of sparse gradients from several ranks: summed if a single process would have one row.

The lookup operation determines which rows a single process has for the global batch. Lookups that read each distinct
row once (`tf.nn.embedding_lookup_sparse`, and thus dense layers on sparse inputs) produce one row with the sum. Other
lookups (`tf.gather`, and thus `Embedding`) produce one row per lookup, and Keras 3 optimizers apply these rows one by
one. Rows of several ranks are therefore summed in the first case, and only concatenated in the second
(docs/decisions/rows-of-sparse-gradients.md).
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session

_SAME_ELEMENTS = ("Reshape", "Identity", "Cast")
_DISTINCT = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")


def combine_duplicate_rows(gathered: Any, own_indices: Any) -> Any:
    """Sum rows of all ranks that have the same index, if a single process would have one row.

    Args:
        gathered: `tf.IndexedSlices` with all ranks' rows.
        own_indices: This rank's indices. A graph shows how they were produced. In eager mode this is unknown, so rows
            stay unchanged, with a warning if a single process might have fewer rows.

    Returns:
        `tf.IndexedSlices`. If rows were summed, each index occurs once, in the order of first occurrence.
    """
    if tf.executing_eagerly():
        _warn_of_duplicate_rows(gathered.indices, own_indices)
        return gathered
    if not _distinct(own_indices):
        return gathered
    indices, segments = tf.unique(gathered.indices)
    values = tf.math.unsorted_segment_sum(gathered.values, segments, tf.size(indices))
    return tf.IndexedSlices(values, indices, gathered.dense_shape)


def _warn_of_duplicate_rows(gathered: Any, own: Any) -> None:
    """Warn if ranks have rows of the same index, and each rank's indices may be unique by construction."""

    def repeats(indices: Any) -> bool:
        return int(tf.size(tf.unique(indices)[0])) < int(tf.size(indices))

    if not repeats(own) and repeats(gathered):
        _warn_once()


@functools.cache
def _warn_once() -> None:
    session = current_session()
    if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
        say("sparse gradients of several ranks have rows of the same index, and in eager mode they are not combined,"
            " so Keras 3's optimizers apply them one by one. If the model has sparse inputs, or uses"
            " tf.nn.embedding_lookup_sparse, a single process would have one row with their sum: pass"
            " sparse_as_dense=True, or put the step into a tf.function")


def _distinct(indices: Any) -> bool:
    """Return whether the graph guarantees that the indices are unique."""
    producer = indices.op
    while producer.type in _SAME_ELEMENTS:
        producer = producer.inputs[0].op
    return producer.type in _DISTINCT
