"""Adasum: an adaptive sum that averages the parallel components of gradients and adds their orthogonal components.

The rule for two vectors and the recursion over ranks follow Maleki et al., "Scaling Distributed Training with
Adaptive Summation" (2020, https://arxiv.org/abs/2006.02924). Each rank combines one part of all ranks' vectors, so the
communication volume equals that of an allreduce. Each level additionally exchanges only the scalar products of whole
vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.backends.interface import Reduction
from hvkeras.collectives.dispatch import allgather_raw, allreduce_raw, alltoall_raw, derived
from hvkeras.errors import UnsupportedError, explain


def adasum_raw(tensors: Sequence[Any], ranks: Sequence[int], name: str | None) -> list[Any]:
    """Combine each tensor across ranks by Adasum, with a few collectives for all tensors and without gradients.

    Args:
        tensors: Floating-point tensors. Shapes (known at trace time) and dtypes are the same on every rank.
        ranks: The participating ranks; a power of two in number.
        name: Identifies the collectives across ranks.

    Returns:
        The results, in the order of `tensors`; the same on every rank.

    Raises:
        UnsupportedError: The number of ranks is not a power of two, a tensor is not floating-point, or a tensor's
            shape is unknown.
    """
    size = len(ranks)
    if size & (size - 1):
        raise UnsupportedError(explain("Adasum combines ranks in pairs, so their number must be a power of two",
                                       "use hvd.Average, or 2, 4, 8, ... ranks", ranks=size))
    for tensor in tensors:
        if not tensor.dtype.is_floating:
            raise UnsupportedError(explain("Adasum combines floating-point numbers", "use hvd.Average or hvd.Sum",
                                           dtype=tensor.dtype.name))
        if tensor.shape.num_elements() is None:
            raise UnsupportedError(explain("Adasum needs shapes that are known when the function is traced",
                                           "use hvd.Average", shape=tensor.shape))
    if size == 1:
        return [tf.identity(tensor) for tensor in tensors]
    results: list[Any] = list(tensors)
    for dtype in dict.fromkeys(_accumulation_dtype(tensor) for tensor in tensors):
        indices = [index for index, tensor in enumerate(tensors) if _accumulation_dtype(tensor) == dtype]
        parts = _combine([tf.cast(tensors[index], dtype) for index in indices], ranks, derived(name, dtype.name))
        for index, part in zip(indices, parts, strict=True):
            results[index] = tf.cast(part, tensors[index].dtype)
    return results


def _accumulation_dtype(tensor: Any) -> Any:
    return tf.float64 if tensor.dtype == tf.float64 else tf.float32


def _combine(tensors: Sequence[Any], ranks: Sequence[int], name: str | None) -> list[Any]:
    size = len(ranks)
    counts = [int(tensor.shape.num_elements()) for tensor in tensors]
    widths = [-(-count // size) for count in counts]  # of one rank's part of each tensor
    rows = tf.concat([tf.reshape(tf.pad(tf.reshape(tensor, [-1]), [[0, width * size - count]]), [size, width])
                      for tensor, count, width in zip(tensors, counts, widths, strict=True)], axis=1)
    vectors = alltoall_raw(rows, tf.ones([size], tf.int64), ranks, derived(name, "parts"))[0]
    vectors = tf.ensure_shape(vectors, [size, sum(widths)])  # row r: this rank's part of rank r's tensors
    tensor_of = np.repeat(np.arange(len(tensors)), widths)
    for level in range(size.bit_length() - 1):
        vectors = _combine_pairs(vectors, widths, tensor_of, ranks, derived(name, f"level {level}"))
    combined = tf.ensure_shape(allgather_raw(vectors, ranks, derived(name, "whole")), [size, sum(widths)])
    starts = list(itertools.accumulate(widths, initial=0))
    return [tf.reshape(tf.reshape(combined[:, start : start + width], [-1])[:count], tensor.shape)
            for tensor, count, start, width in zip(tensors, counts, starts, widths, strict=False)]


def _combine_pairs(vectors: Any, widths: Sequence[int], tensor_of: Any, ranks: Sequence[int],
                    name: str | None) -> Any:
    """Combine rows 0 and 1, rows 2 and 3, ..., which halves the number of rows."""
    one, other = vectors[0::2], vectors[1::2]
    products = tf.stack([one * one, other * other, one * other])  # [3, pairs, elements]
    partial = [tf.reduce_sum(tf.cast(part, tf.float64), axis=-1) for part in tf.split(products, widths, axis=-1)]
    squares, other_squares, dots = tf.unstack(
        allreduce_raw([tf.stack(partial, axis=-1)], Reduction.SUM, ranks, name, "allreduce")[0])  # [pairs, tensors]
    weights = [tf.cast(1.0 - tf.math.divide_no_nan(dots, 2.0 * square), vectors.dtype)
               for square in (squares, other_squares)]
    return sum(tf.gather(weight, tensor_of, axis=1) * half
               for weight, half in zip(weights, (one, other), strict=True))
