"""Marks of batches: numbers that differ if ranks have different batches, computed in each step from some values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs

_SAMPLED = 4096  # values of each array, evenly spaced
_BUCKETS = 2**20  # of hashes of strings


@graphs.without_autograph
def mark_of(leaves: Sequence[Any]) -> Any:
    """Return the mark of a batch, and the sum of the magnitudes of the values in it: two float64 numbers.

    Args:
        leaves: Its dense arrays; values that are neither numbers nor strings are ignored.
    """
    marks = [mark for mark in map(_mark_of, leaves) if mark is not None]
    return tf.add_n([tf.stack(mark) for mark in marks]) if marks else tf.zeros([2], tf.float64)


def _mark_of(values: Any) -> tuple[Any, Any] | None:
    """Return a sum that depends on values and their order, and the sum of their magnitudes."""
    dtype = values.dtype
    if dtype == tf.string:
        values = tf.strings.to_hash_bucket_fast(values, _BUCKETS)
    elif not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return None
    flat = tf.reshape(values, [-1])
    stride = tf.maximum(tf.size(flat) // _SAMPLED, 1) if flat.shape[0] is None else max(flat.shape[0] // _SAMPLED, 1)
    sampled = tf.cast(flat[::stride], tf.float64)
    finite = tf.where(tf.math.is_finite(sampled), sampled, tf.zeros_like(sampled))
    factors = tf.cos(tf.range(1, tf.size(sampled) + 1, dtype=tf.float64))
    return tf.reduce_sum(finite * factors), tf.reduce_sum(tf.abs(finite))
