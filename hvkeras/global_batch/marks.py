"""Marks of batches: numbers that differ if ranks have different batches, computed in each step from some values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.collectives.row_share import global_batch
from hvkeras.compat import graphs
from hvkeras.job.session import current_session

_SAMPLED = 4096  # values of each array, evenly spaced
_BUCKETS = 2**20  # of hashes of strings


@dataclass(frozen=True)
class Mark:
    """Mark of a batch on this rank.

    Attributes:
        value: The mark, a float64 scalar.
        scale: The sum of the magnitudes of the values in it.
    """

    value: Any
    scale: Any

    def compare(self, total: Any) -> None:
        """Note how far this rank's mark is from the mean over all ranks, given their sum."""
        mean = total / current_session().topology.size
        global_batch().note_deviation(tf.math.divide_no_nan(tf.abs(self.value - mean), self.scale))


@graphs.without_autograph
def mark_of(leaves: Sequence[Any]) -> Mark:
    """Return the mark of a batch.

    Args:
        leaves: Its arrays: tensors, dense, ragged or sparse; other values are ignored.
    """
    found = (_mark_of(_values_of(leaf)) for leaf in leaves if tf.is_tensor(leaf))
    marks = [mark for mark in found if mark is not None]
    zero = tf.constant(0.0, tf.float64)
    return Mark(sum((value for value, _ in marks), zero), sum((scale for _, scale in marks), zero))


def _values_of(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.flat_values
    return leaf.values if isinstance(leaf, tf.sparse.SparseTensor) else leaf


def _mark_of(values: Any) -> tuple[Any, Any] | None:
    """Return a sum that depends on values and their order, and the sum of their magnitudes."""
    dtype = values.dtype
    if dtype == tf.string:
        if graphs.compiled_by_xla():
            return None
        values = tf.strings.to_hash_bucket_fast(values, _BUCKETS)
    elif not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return None
    flat = tf.reshape(values, [-1])
    stride = tf.maximum(tf.size(flat) // _SAMPLED, 1) if flat.shape[0] is None else max(flat.shape[0] // _SAMPLED, 1)
    sampled = tf.cast(flat[::stride], tf.float64)
    finite = tf.where(tf.math.is_finite(sampled), sampled, tf.zeros_like(sampled))
    factors = tf.cos(tf.range(1, tf.size(sampled) + 1, dtype=tf.float64))
    return tf.reduce_sum(finite * factors), tf.reduce_sum(tf.abs(finite))
