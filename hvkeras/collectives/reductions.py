"""The public collectives allreduce, allgather, their grouped forms, broadcast and barrier.

All work in eager mode and inside `tf.function`, and have gradients. `hvkeras.collectives.dispatch` is the next lower
layer; `hvkeras.collectives.scattering` has the collectives whose results differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras.backends.interface import Reduction
from hvkeras.collectives.compression import Compression, require_stateless
from hvkeras.collectives.differentiable import combined, combined_slices, gathered, summed_for_gradient
from hvkeras.collectives.dispatch import allreduce_raw, broadcast_raw, derived
from hvkeras.collectives.operations import (
    NAMES,
    Adasum,
    Average,
    Scaling,
    Sum,
    members,
    on_device,
    operation_of,
    require_root,
)
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session
from hvkeras.typing import CompressorLike, Operation, Tensor, TensorLike


@graphs.without_autograph
def allreduce(
    tensor: TensorLike, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
) -> Tensor:
    """Reduce a tensor elementwise over all ranks; every rank gets the result.

    Averages of integers are truncated. The gradient of Average, Sum and (as in Horovod) Adasum is the same operation on
    the incoming gradient. `tf.IndexedSlices` stay sparse: their values and indices are gathered. In that case, as in
    Horovod, averages of integers are not truncated but floating-point: float32 for 8 and 16 bits, otherwise float64.
    All engines combine and scale float16 and bfloat16 in float32, and round once.

    Example:
        >>> loss = hvd.allreduce(loss)                     # the mean over all ranks
        >>> longest = hvd.allreduce(length, op=hvd.Max)

    Args:
        tensor: Anything that `tf.convert_to_tensor` accepts, or `tf.IndexedSlices`; same shape and dtype on every rank.
        average: Horovod's older alternative to `op`: True is Average, False is Sum.
        device_dense: The device for dense tensors; chosen by TensorFlow by default.
        device_sparse: The device for `tf.IndexedSlices`.
        compression: How the tensor is compressed: one of `Compression`, or a `Compressor`.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor applied to each rank's tensor before the reduction.
        postscale_factor: Factor applied to the result.
        name: Identifies the collective across ranks; by default, operation, dtype and shape do.
        process_set: The participating ranks.
        ignore_name_scope: Accepted for compatibility with Horovod; name scopes never matter here.

    Returns:
        The result, with the shape and dtype of `tensor` (except for integer averages of `tf.IndexedSlices`).

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `op` is not one of the constants.
        ArgumentError: This rank is not in `process_set`.
        UnsupportedError: The operation is not supported for sparse tensors, for booleans or, with Adasum, for integers;
            or Adasum is used with a number of ranks that is not a power of two.
    """
    require_stateless(compression)
    scaled = Scaling(_resolve_op(average, op), compression, prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with on_device(device_sparse):
            return _allreduce_slices(tensor, scaled, name, process_set)
    with on_device(device_dense):
        return _allreduce_all([tensor], scaled, name, process_set, "allreduce")[0]


@graphs.without_autograph
def grouped_allreduce(
    tensors: Sequence[TensorLike], average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: CompressorLike = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    name: str | None = None,
) -> list[Tensor]:
    """Reduce several tensors over all ranks in as few collectives as possible, one for each dtype.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy])

    Args:
        tensors: The tensors, in the same order on every rank. `tf.IndexedSlices` stay sparse, and are gathered one by
            one.
        average: As for `allreduce`, like the remaining parameters.
        device_dense: The device for dense tensors.
        device_sparse: The device for `tf.IndexedSlices`.
        compression: How the tensors are compressed.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor applied to each rank's tensors before the reduction.
        postscale_factor: Factor applied to the results.
        process_set: The participating ranks.
        ignore_name_scope: Accepted for compatibility with Horovod.
        name: Identifies the group across ranks.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `allreduce`, or no tensors were given.
        UnsupportedError: As for `allreduce`.
    """
    if not tensors:
        raise UsageError(explain("A group must contain at least one tensor", tensors=tensors))
    require_stateless(compression)
    scaled = Scaling(_resolve_op(average, op), compression, prescale_factor, postscale_factor)
    results: list[Any] = list(tensors)
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    if dense:
        with on_device(device_dense):
            combined = _allreduce_all([tensors[index] for index in dense], scaled, name, process_set,
                                      "grouped allreduce")
        for index, tensor in zip(dense, combined, strict=True):
            results[index] = tensor
    for index in sorted(set(range(len(tensors))) - set(dense)):
        with on_device(device_sparse):
            results[index] = _allreduce_slices(tensors[index], scaled, derived(name, str(index)), process_set)
    return results


@graphs.without_autograph
def allgather(
    tensor: TensorLike, name: str | None = None, ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order.

    The gradient is this rank's part of the summed gradients (HVKERAS_GRADIENTS=horovod: of the averaged gradients).

    Example:
        >>> everyone = hvd.allgather(tf.constant([[hvd.rank()]]))   # shape [size, 1]

    Args:
        tensor: Anything that `tf.convert_to_tensor` accepts; the first dimension may differ between ranks.
            A scalar counts as one row.
        name: Identifies the collective across ranks.
        ignore_name_scope: Accepted for compatibility with Horovod.
        process_set: The participating ranks.

    Returns:
        A tensor of shape `[sum of first dimensions, ...]`.

    Raises:
        NotInitializedError: `init()` was not called.
        ArgumentError: This rank is not in `process_set`.
    """
    ranks = members(process_set, "allgather")
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0:
        value = tf.reshape(value, [1])
    elif value.shape.rank is None:  # may be a scalar at run time
        missing = tf.maximum(0, 1 - tf.rank(value))
        value = tf.reshape(value, tf.concat([tf.ones([missing], tf.int32), tf.shape(value)], 0))

    result: Tensor = gathered(value, ranks, name)
    return result


@graphs.without_autograph
def grouped_allgather(
    tensors: Sequence[TensorLike], name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Concatenate each of several tensors over the ranks along the first dimension, in rank order.

    Example:
        >>> values, indices = hvd.grouped_allgather([values, indices])

    Args:
        tensors: The tensors, in the same order on every rank; see `allgather`.
        name: Identifies the group across ranks.
        ignore_name_scope: Accepted for compatibility with Horovod.
        process_set: The participating ranks.

    Returns:
        The results, in the order of `tensors`.

    Raises:
        NotInitializedError: `init()` was not called.
        ArgumentError: This rank is not in `process_set`.
    """
    return [allgather(tensor, derived(name, str(number)), process_set=process_set)
            for number, tensor in enumerate(tensors)]


@graphs.without_autograph
def broadcast(
    tensor: TensorLike, root_rank: int, name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Broadcast a tensor from the root to every rank.

    The gradient on the root is the sum of all ranks' gradients (HVKERAS_GRADIENTS=horovod: their average). It is zero
    on all other ranks.

    Example:
        >>> seed = hvd.broadcast(seed, root_rank=0)

    Args:
        tensor: The value to send on the root; on other ranks, any tensor of the same shape and dtype.
        root_rank: The global rank that sends.
        name: Identifies the collective across ranks.
        ignore_name_scope: Accepted for compatibility with Horovod.
        process_set: The participating ranks.

    Returns:
        The root's value.

    Raises:
        NotInitializedError: `init()` was not called.
        ArgumentError: The root or this rank is not in `process_set`.
    """
    ranks = members(process_set, "broadcast")
    require_root(root_rank, ranks)

    @graphs.custom_gradient
    def send(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            summed = summed_for_gradient(upstream, ranks, name)
            # tf.where instead of a Python condition, so that the gradient of this gradient is a collective on every
            # rank.
            return tf.where(current_session().topology.rank == root_rank, summed, tf.zeros_like(summed))

        return broadcast_raw([value], root_rank, ranks, name)[0], gradient

    sent: Tensor = send(tf.convert_to_tensor(tensor))
    return sent


@graphs.without_autograph
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Operation | None:
    """Wait until every rank has reached the barrier.

    Example:
        >>> hvd.barrier()

    Args:
        process_set: The ranks that wait for each other.
        name: Identifies the barrier across ranks.

    Returns:
        None in eager mode; inside a `tf.function`, the operation that waits.

    Raises:
        NotInitializedError: `init()` was not called.
        ArgumentError: This rank is not in `process_set`.
    """
    done = allreduce_raw([tf.zeros([1])], Reduction.SUM, members(process_set, "barrier"), name, "barrier")
    if tf.executing_eagerly():
        return None
    operation: Operation = tf.group(*done)
    return operation


def _resolve_op(average: bool | None, op: int | None) -> int:
    if average is not None and op is not None:
        raise UsageError(explain("Only one of average and op can be given", "leave out average", average=average,
                                 op=op))
    if op is None:
        return Sum if average is False else Average
    return operation_of(op)


def _allreduce_all(tensors: Sequence[Any], scaled: Scaling, name: str | None, process_set: ProcessSet,
                   operation: str) -> list[Tensor]:
    ranks = members(process_set, operation)
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if any(value.dtype == tf.bool for value in values):
        return _allreduce_booleans(values, scaled, name, process_set, operation)
    return combined(values, scaled, ranks, name, operation)


def _allreduce_booleans(values: Sequence[Any], scaled: Scaling, name: str | None, process_set: ProcessSet,
                        operation: str) -> list[Any]:
    """Reduce booleans: Max is "any", Min and Product are "all"."""
    if scaled.op in (Average, Sum, Adasum):
        raise UnsupportedError(explain("Booleans have no sum or average", "use hvd.Max for any, hvd.Min for all, or"
                                       " tf.cast the tensor", op=NAMES[scaled.op]))
    numbers = [tf.cast(value, tf.int32) if value.dtype == tf.bool else value for value in values]
    results = _allreduce_all(numbers, scaled, name, process_set, operation)
    return [tf.cast(result, value.dtype) for result, value in zip(results, values, strict=True)]


def _allreduce_slices(slices: Any, scaled: Scaling, name: str | None, process_set: ProcessSet) -> Tensor:
    if scaled.op not in (Average, Sum):
        raise UnsupportedError(explain("tf.IndexedSlices can only be summed or averaged", "tf.convert_to_tensor them",
                                       op=NAMES[scaled.op]))
    slices_of_all: Tensor = combined_slices(slices, scaled, members(process_set, "allreduce"), name)
    return slices_of_all
