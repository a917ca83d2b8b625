"""Collectives whose results differ between ranks: alltoall, reducescatter and grouped_reducescatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import tensorflow as tf

from hvkeras.collectives.compression import Compression, require_stateless
from hvkeras.collectives.differentiable import gathered
from hvkeras.collectives.dispatch import alltoall_raw, derived, reducescatter_raw
from hvkeras.collectives.operations import (
    NAMES,
    Average,
    Scaling,
    Sum,
    gradient_divisor,
    members,
    on_device,
    operation_of,
    reducing_engine,
)
from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import ArgumentError
from hvkeras.errors import UsageError, explain
from hvkeras.horovod import as_horovod
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.typing import CompressorLike, Tensor, TensorLike


@overload
def alltoall(
    tensor: TensorLike, splits: None = None, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
@overload
def alltoall(
    tensor: TensorLike, splits: TensorLike, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, Tensor]: ...
@graphs.without_autograph
def alltoall(
    tensor: TensorLike, splits: TensorLike | None = None, name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send different rows to each rank, and return the rows that the ranks sent to this rank.

    The gradient sends the gradients of the rows back.

    Example:
        >>> mine = hvd.alltoall(tf.range(hvd.size()))          # one number from each rank
        >>> rows, counts = hvd.alltoall(rows, splits=[0, 3])   # three rows to rank 1

    Args:
        tensor: Anything that `tf.convert_to_tensor` accepts, with at least one dimension; only the first dimension may
            differ between ranks.
        splits: The number of rows for each rank: integers of shape `[number of ranks]` that add up to the first
            dimension. By default, each rank gets the same number of rows.
        name: Identifies the collective across ranks.
        ignore_name_scope: Accepted for compatibility with Horovod; name scopes never matter here.
        process_set: The participating ranks.

    Returns:
        The received rows, in rank order. With `splits`, also the number of rows from each rank, in the dtype of
        `splits` (int32 for Python numbers).

    Raises:
        NotInitializedError: `init()` was not called.
        ArgumentError: This rank is not in `process_set`, or the rows cannot be split as requested.
    """
    ranks = members(process_set, "alltoall")
    value = _with_rows(tf.convert_to_tensor(tensor), "alltoall sends rows, so its tensor needs a first dimension",
                       "tf.reshape(tensor, [-1])")
    given_splits = None if splits is None else tf.convert_to_tensor(splits)
    rows = _row_counts(value, given_splits, len(ranks))
    with tf.control_dependencies([rows]):  # the ranks compare their shapes only once this rank's rows are checked
        value = tf.identity(value)
    received, counts = _exchange(value, rows, ranks, name)
    return received if given_splits is None else (received, tf.cast(counts, given_splits.dtype))


@graphs.without_autograph
def reducescatter(
    tensor: TensorLike, device_dense: str = "", compression: CompressorLike = Compression.none, op: int = Average,
    name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor elementwise over all ranks, and give each rank its part of the rows.

    If the rows cannot be split evenly, the first ranks get one more row. The gradient gathers the gradients of the
    parts (HVKERAS_GRADIENTS=horovod: and multiplies them by the number of ranks).

    Example:
        >>> part = hvd.reducescatter(tf.ones([2 * hvd.size(), 3]), op=hvd.Sum)   # shape [2, 3]

    Args:
        tensor: Anything that `tf.convert_to_tensor` accepts, with at least one dimension; same shape and dtype on every
            rank.
        device_dense: The device for the tensor; chosen by TensorFlow by default.
        compression: How the tensor is compressed: one of `Compression`, or a `Compressor`.
        op: Average (default) or Sum.
        name: Identifies the collective across ranks.
        process_set: The participating ranks.
        ignore_name_scope: Accepted for compatibility with Horovod; name scopes never matter here.
        prescale_factor: Factor applied to each rank's tensor before the reduction.
        postscale_factor: Factor applied to the result.

    Returns:
        This rank's rows of the result.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `op` is neither Average nor Sum.
        ArgumentError: The tensor is a scalar, or this rank is not in `process_set`.
    """
    if operation_of(op) not in (Average, Sum):
        raise UsageError(explain("reducescatter combines by hvd.Average or hvd.Sum", op=NAMES[op]))
    require_stateless(compression)
    scaled = Scaling(op, compression, prescale_factor, postscale_factor)
    ranks = members(process_set, "reducescatter")
    value = _with_rows(tf.convert_to_tensor(tensor), "reducescatter distributes rows, so its tensor needs a first"
                       " dimension", "hvd.allreduce a scalar")

    @graphs.custom_gradient
    def scatter(full: Any) -> tuple[Any, Callable[[Any], Any]]:
        sent = scaled.sent(full, len(ranks), reducing_engine(ranks))
        part = reducescatter_raw(sent.tensor, ranks, name, scaled.text, sent.factors, sent.spec)

        def gradient(upstream: Any) -> Any:
            back = scaled.sent(upstream, len(ranks))
            gathered_gradient = gathered(back.tensor, ranks, derived(name, "gradient"))
            exact, factor = scaled.received(gathered_gradient, back, len(ranks)), gradient_divisor(ranks)
            return exact if factor == 1 else exact * tf.cast(factor, exact.dtype)

        return scaled.received(part, sent, len(ranks)), gradient

    with on_device(device_dense):
        part: Tensor = scatter(value)
        return part


@graphs.without_autograph
def grouped_reducescatter(
    tensors: Sequence[TensorLike], device_dense: str = "", compression: CompressorLike = Compression.none,
    op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors.

    Example:
        >>> parts = hvd.grouped_reducescatter([tf.ones([4]), tf.ones([8, 2])])

    Args:
        tensors: The tensors, in the same order on every rank.
        device_dense: As for `reducescatter`, like the remaining parameters.
        compression: How the tensors are compressed.
        op: Average (default) or Sum.
        process_set: The participating ranks.
        prescale_factor: Factor applied to each rank's tensors before the reduction.
        postscale_factor: Factor applied to the results.

    Returns:
        This rank's rows of each result.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `reducescatter`.
    """
    return [reducescatter(tensor, device_dense, compression, op, None, process_set, False, prescale_factor,
                          postscale_factor) for tensor in tensors]


def _with_rows(value: Any, must: str, fix: str) -> Any:
    """Raise ArgumentError for a scalar; at run time if the rank of the tensor is unknown."""
    if value.shape.rank == 0:
        raise ArgumentError(explain(must, fix, shape=value.shape))
    if value.shape.rank is None:
        with tf.control_dependencies([tf.debugging.Assert(tf.rank(value) > 0, [explain(must, fix, shape="()")])]):
            return tf.identity(value)
    return value


def _exchange(value: Any, rows: Any, ranks: tuple[int, ...], name: str | None) -> tuple[Tensor, Tensor]:
    """Exchange rows; return them and their number from each rank. The gradient is itself differentiable."""

    @graphs.custom_gradient
    def exchange(sent: Any) -> tuple[tuple[Any, Any], Callable[..., Any]]:
        received, counts = alltoall_raw(sent, rows, ranks, name)

        def gradient(upstream: Any, _: Any = None) -> Any:
            return _exchange(upstream, counts, ranks, derived(name, "gradient"))[0]

        return (received, counts), gradient

    received, counts = exchange(value)
    return received, counts


def _row_counts(value: Any, splits: Any, size: int) -> Any:
    """Return the number of rows for each rank, validated now if the values are known, else in the graph."""
    rows = None if value.shape.rank is None else value.shape[0]
    count = tf.shape(value, tf.int64)[0]
    if splits is None:
        evenly = "Without splits, alltoall sends the same number of rows to each rank"
        if rows is not None and rows % size:
            raise ArgumentError(explain(evenly, "pass splits=", rows=rows, ranks=size))
        checks = [] if rows is not None else [tf.debugging.Assert(count % size == 0, [
            f"{evenly}. HINT: pass splits=. Received: rows", count, "ranks", size])]
        with tf.control_dependencies(checks):
            return tf.fill([size], count // size)
    if not splits.dtype.is_integer or not splits.shape.is_compatible_with([size]):
        raise ArgumentError(explain("splits must hold one integer for each participating rank", splits=splits,
                                    ranks=size))
    if as_horovod.is_installed() and splits.dtype != tf.int32:
        raise ArgumentError(explain("splits must be int32 for Horovod", "tf.cast them, or import hvkeras.tensorflow,"
                                    " which also takes other integers", dtype=splits.dtype.name))
    known, must = tf.get_static_value(splits), "splits must not be negative, and must add up to the first dimension"
    if known is not None and rows is not None:
        if known.min() < 0 or sum(known.tolist()) != rows:  # Python's numbers do not wrap
            raise ArgumentError(explain(must, splits=known.tolist(), rows=rows))
        return tf.cast(splits, tf.int64)
    given = tf.reshape(tf.cast(splits, tf.int64), [-1])
    fit = tf.reduce_all((given >= 0) & (given <= count)) & (tf.reduce_sum(given) == count) & (tf.size(splits) == size)
    with tf.control_dependencies([tf.debugging.Assert(fit, [
            f"{must}, one for each rank. Received: splits", splits, "rows", count, "ranks", size])]):
        return tf.ensure_shape(given, [size])
