"""The collectives that users call: allreduce, grouped_allreduce, allgather, broadcast and barrier.

All work in eager mode and inside `tf.function`, and have gradients. Each describes itself in a
`hvkeras.agreement.Plan`, so that ranks that do different things end in an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import context, graphs
from hvkeras.backends.interface import Reduction
from hvkeras.compression import Compression
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.operations import (
    NAMES,
    REDUCTIONS,
    Average,
    Scaling,
    Sum,
    members,
    on_device,
    operation_of,
    plan_of,
    require_root,
    shaped,
)
from hvkeras.process_sets import ProcessSet, global_process_set


def allreduce(
    tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
) -> Any:
    """Combines a tensor of all ranks elementwise; every rank gets the result.

    Averages of integers are truncated. The gradient of Average and Sum is the same operation on
    the incoming gradient. `tf.IndexedSlices` stay sparse: values and indices are gathered.

    Example:
        >>> loss = hvd.allreduce(loss)                     # the mean over all ranks
        >>> longest = hvd.allreduce(length, op=hvd.Max)

    Args:
        tensor: What `tf.convert_to_tensor` takes, or `tf.IndexedSlices`; same shape and dtype on every rank.
        average: Horovod's old way to say `op`: True is Average, False is Sum.
        device_dense: The device for dense tensors; TensorFlow's choice by default.
        device_sparse: The device for `tf.IndexedSlices`.
        compression: What the tensor travels as: one of `Compression`, or a `Compressor`.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: Multiplies each rank's tensor first.
        postscale_factor: Multiplies the result.
        name: Identifies the collective across ranks; without one, operation, dtype and shape do.
        process_set: The ranks that take part.
        ignore_name_scope: Accepted for Horovod's sake; name scopes never matter here.

    Returns:
        The result, of the given shape and dtype.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: `op` is not one of the constants, or this rank is not in `process_set`.
        UnsupportedError: Adasum, or an operation that sparse tensors or booleans do not have.
    """
    scaled = Scaling(_chosen(average, op), compression, prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with on_device(device_sparse):
            return _allreduce_slices(tensor, scaled, name, process_set)
    with on_device(device_dense):
        return _allreduce_all([tensor], scaled, name, process_set, "allreduce")[0]


def grouped_allreduce(
    tensors: Sequence[Any], average: bool | None = None, device_dense: str = "",
    device_sparse: str = "",  # noqa: ARG001 - Horovod's parameter
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    name: str | None = None,
) -> list[Any]:
    """Combines several tensors in as few collectives as possible, one a dtype.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy])

    Args:
        tensors: The tensors, in the same order on every rank; no `tf.IndexedSlices`.
        average: As for `allreduce`, like all that follow.
        device_dense: The device for the tensors.
        device_sparse: Accepted for Horovod's sake.
        compression: What the tensors travel as.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: Multiplies each rank's tensors first.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.
        ignore_name_scope: Accepted for Horovod's sake.
        name: Identifies the group across ranks.

    Returns:
        The results, in order.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `allreduce`, or no tensors were given.
        UnsupportedError: As for `allreduce`.
    """
    if not tensors or any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise UsageError(explain("A group is one or more dense tensors", "reduce tf.IndexedSlices one by one",
                                 tensors=tensors))
    scaled = Scaling(_chosen(average, op), compression, prescale_factor, postscale_factor)
    with on_device(device_dense):
        return _allreduce_all(tensors, scaled, name, process_set, "grouped allreduce")


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates the ranks' tensors along the first dimension, in rank order.

    Its gradient is this rank's part of the summed gradients.

    Example:
        >>> everyone = hvd.allgather(tf.constant([[hvd.rank()]]))   # shape [size, 1]

    Args:
        tensor: What `tf.convert_to_tensor` takes; the first dimension may differ between ranks.
            A scalar counts as one row.
        name: Identifies the collective across ranks.
        ignore_name_scope: Accepted for Horovod's sake.
        process_set: The ranks that take part.

    Returns:
        A tensor of shape `[sum of first dimensions, ...]`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: This rank is not in `process_set`.
    """
    ranks = members(process_set, "allgather")
    value = tf.convert_to_tensor(tensor)
    value = tf.reshape(value, [1]) if value.shape.rank == 0 else value

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def gather(rows: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            mine = ranks.index(context.current().topology.rank)
            if graphs.compiled_by_xla():  # shapes are static there, so all ranks gather as many rows
                summed = _allreduce_raw([upstream], Reduction.SUM, ranks, _derived(name, "gradient"), "allreduce")[0]
                return tf.split(summed, len(ranks))[mine]
            counts = allgather_raw(tf.shape(rows)[:1], ranks, _derived(name, "counts"))
            summed = _allreduce_raw([upstream], Reduction.SUM, ranks, _derived(name, "gradient"), "allreduce")[0]
            start = tf.reduce_sum(counts[:mine])
            return summed[start : start + counts[mine]]

        return allgather_raw(rows, ranks, name), gradient

    return gather(value)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's tensor.

    Its gradient is the sum of all ranks' gradients on the root, and zero elsewhere.

    Example:
        >>> seed = hvd.broadcast(seed, root_rank=0)

    Args:
        tensor: The value on the root; elsewhere anything of its shape and dtype.
        root_rank: The global rank that sends.
        name: Identifies the collective across ranks.
        ignore_name_scope: Accepted for Horovod's sake.
        process_set: The ranks that take part.

    Returns:
        The root's value.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root or this rank is not in `process_set`.
    """
    ranks = members(process_set, "broadcast")
    require_root(root_rank, ranks)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def send(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            summed = _allreduce_raw([upstream], Reduction.SUM, ranks, _derived(name, "gradient"), "allreduce")[0]
            return summed if context.current().topology.rank == root_rank else tf.zeros_like(summed)

        return broadcast_raw([value], root_rank, ranks, name)[0], gradient

    return send(tf.convert_to_tensor(tensor))


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Waits until every rank has come here.

    Example:
        >>> hvd.barrier()

    Args:
        process_set: The ranks that wait for each other.
        name: Identifies the barrier across ranks.

    Returns:
        Inside a `tf.function` the operation that waits; None in eager mode.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: This rank is not in `process_set`.
    """
    done = _allreduce_raw([tf.zeros([1])], Reduction.SUM, members(process_set, "barrier"), name, "barrier")
    return None if tf.executing_eagerly() else tf.group(*done)


def _chosen(average: bool | None, op: int | None) -> int:
    if average is not None and op is not None:
        raise UsageError(explain("Only one of average and op can be given", "leave out average", average=average,
                                 op=op))
    if op is None:
        return Sum if average is False else Average
    return operation_of(op)


def _allreduce_all(tensors: Sequence[Any], scaled: Scaling, name: str | None, process_set: ProcessSet,
                   operation: str) -> list[Any]:
    ranks = members(process_set, operation)
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if any(value.dtype == tf.bool for value in values):
        return _allreduce_booleans(values, scaled, name, process_set, operation)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def reduce(*inputs: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        def gradient(*upstream: Any) -> list[Any]:
            if scaled.op not in (Average, Sum):
                raise UnsupportedError(explain(f"allreduce with op=hvd.{NAMES[scaled.op]} has no gradient",
                                               "use hvd.Average or hvd.Sum, or tf.stop_gradient"))
            return combine(upstream, _derived(name, "gradient"))

        return combine(inputs, name), gradient

    def combine(inputs: Sequence[Any], called: str | None) -> list[Any]:
        sent = [scaled.before(tensor) for tensor in inputs]
        received = _allreduce_raw([tensor for tensor, _ in sent], REDUCTIONS[scaled.op], ranks, called, operation)
        return [scaled.after(tensor, restore, len(ranks)) for tensor, (_, restore) in zip(received, sent, strict=True)]

    results: list[Any] = reduce(*values)
    return results if isinstance(results, (list, tuple)) else [results]


def _allreduce_booleans(values: Sequence[Any], scaled: Scaling, name: str | None, process_set: ProcessSet,
                        operation: str) -> list[Any]:
    """Max of booleans is "any", Min and Product are "all"; a sum of them is a number, which they cannot hold."""
    if scaled.op in (Average, Sum):
        raise UnsupportedError(explain("Booleans have no sum or average", "use hvd.Max for any, hvd.Min for all, or"
                                       " tf.cast the tensor", op=NAMES[scaled.op]))
    numbers = [tf.cast(value, tf.int32) if value.dtype == tf.bool else value for value in values]
    results = _allreduce_all(numbers, scaled, name, process_set, operation)
    return [tf.cast(result, value.dtype) for result, value in zip(results, values, strict=True)]


def _allreduce_slices(slices: Any, scaled: Scaling, name: str | None, process_set: ProcessSet) -> Any:
    if scaled.op not in (Average, Sum):
        raise UnsupportedError(explain("tf.IndexedSlices can only be summed or averaged", "tf.convert_to_tensor them",
                                       op=NAMES[scaled.op]))
    ranks = members(process_set, "allreduce")
    values, restore = scaled.before(slices.values)
    gathered = allgather_raw(values, ranks, _derived(name, "values"))
    indices = allgather_raw(slices.indices, ranks, _derived(name, "indices"))
    return tf.IndexedSlices(scaled.after(gathered, restore, len(ranks)), indices, slices.dense_shape)


def _allreduce_raw(tensors: Sequence[Any], reduction: Reduction, ranks: Sequence[int], name: str | None,
                   operation: str) -> list[Any]:
    job = context.current()
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if len(ranks) == 1:
        return [tf.identity(tensor) for tensor in tensors]
    graphs.require_no_xla(job.backend)
    plan = plan_of(f"{operation} {reduction.value}", tensors, ranks, name, _label(operation, name))
    results: list[Any] = list(tensors)
    with job.entries.entering(plan):
        for number, dtype in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors)):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            reduced = job.backend.allreduce([tensors[place] for place in places], f"{plan.key}.{number}", reduction,
                                            ranks)
            for place, tensor in zip(places, reduced, strict=True):
                results[place] = shaped(tensor, tensors[place])
    return results


def allgather_raw(tensor: Any, ranks: Sequence[int], name: str | None) -> Any:
    """Gathers a tensor, without a gradient."""
    job = context.current()
    if len(ranks) == 1:
        return tf.identity(tensor)
    graphs.require_no_xla(job.backend)
    shape = tf.TensorShape(None) if tensor.shape.rank is None else tf.TensorShape([None, *tensor.shape[1:]])
    plan = plan_of("allgather", [tf.TensorSpec(shape, tensor.dtype)], ranks, name, _label("allgather", name))
    with job.entries.entering(plan):
        gathered = job.backend.allgather(tensor, plan.key, ranks)
    if not tf.executing_eagerly():
        gathered.set_shape(shape)
    return gathered


def broadcast_raw(tensors: Sequence[Any], root_rank: int, ranks: Sequence[int], name: str | None,
                  names: Sequence[str] | None = None) -> list[Any]:
    """Broadcasts tensors, each in a collective of its own, under one plan and without gradients."""
    job = context.current()
    if len(ranks) == 1:
        return [tf.identity(tensor) for tensor in tensors]
    graphs.require_no_xla(job.backend)
    plan = plan_of(f"broadcast from {root_rank}", tensors, ranks, name, _label("broadcast", name), names)
    with job.entries.entering(plan):
        return [shaped(job.backend.broadcast(tensor, root_rank, f"{plan.key}.{number}", ranks), tensor)
                for number, tensor in enumerate(tensors)]


def _label(operation: str, name: str | None) -> str:
    return f'{operation} "{name}"' if name else f"an unnamed {operation}"


def _derived(name: str | None, suffix: str) -> str | None:
    return name and f"{name}.{suffix}"


