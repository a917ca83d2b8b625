"""Rank queries as TensorFlow operations, evaluated when a graph runs instead of when it is traced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.job import queries
from hvkeras.job.process_sets import process_set_of
from hvkeras.typing import Tensor


@graphs.without_autograph
def rank_op(name: str | None = None) -> Tensor:
    """Return the rank of this process as a tensor.

    The operation is evaluated when a graph runs, whereas `hvd.rank()` inside a `tf.function` is constant after tracing.

    Example:
        >>> tf.function(hvd.rank_op)()

    Args:
        name: The operation's name.

    Returns:
        An int32 scalar, from 0 to `size() - 1`.

    Raises:
        NotInitializedError: `init()` was not called. A graph raises it when it runs.
    """
    return _at_run_time(queries.rank, name)


@graphs.without_autograph
def local_rank_op(name: str | None = None) -> Tensor:
    """Return the local rank of this process on its host as a tensor; see `rank_op`.

    Example:
        >>> tf.function(hvd.local_rank_op)()

    Args:
        name: The operation's name.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: As for `rank_op`.
    """
    return _at_run_time(queries.local_rank, name)


@graphs.without_autograph
def local_size_op(name: str | None = None) -> Tensor:
    """Return the number of processes on this host as a tensor; see `rank_op`.

    Example:
        >>> tf.function(hvd.local_size_op)()

    Args:
        name: The operation's name.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: As for `rank_op`.
    """
    return _at_run_time(queries.local_size, name)


@graphs.without_autograph
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return the number of processes in a process set as a tensor; see `rank_op`.

    Example:
        >>> mean = total / tf.cast(hvd.size_op(), total.dtype)

    Args:
        process_set_id: The ID of the set: 0 for all ranks, else the attribute `process_set_id` of a registered set.
        name: The operation's name.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: As for `rank_op`.
        UsageError: No set with this ID is registered. A graph raises it when it runs.
    """
    return _at_run_time(lambda: len(process_set_of(process_set_id).members()), name)


@graphs.without_autograph
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return whether this process is in a process set as a tensor; see `rank_op`.

    Example:
        >>> tf.cond(hvd.process_set_included_op(even.process_set_id) == 1, step, tf.no_op)

    Args:
        process_set_id: The ID of the set: 0 for all ranks, else the attribute `process_set_id` of a registered set.
        name: The operation's name.

    Returns:
        An int32 scalar: 1 or 0.

    Raises:
        NotInitializedError: As for `rank_op`.
        UsageError: As for `size_op`.
    """
    return _at_run_time(lambda: int(process_set_of(process_set_id).included()), name)


def _at_run_time(query: Callable[[], int], name: str | None) -> Tensor:
    if tf.executing_eagerly() or graphs.compiled_by_xla():  # XLA cannot call Python, so the value is a constant
        constant: Tensor = tf.constant(query(), tf.int32, name=name)
        return constant
    number: Tensor = tf.numpy_function(lambda: np.int32(query()), [], tf.int32, name=name)
    number.set_shape([])
    return number
