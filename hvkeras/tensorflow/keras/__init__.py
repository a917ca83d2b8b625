"""Alias module for `horovod.tensorflow.keras`, whose collectives take and return values instead of tensors."""

from __future__ import annotations

from hvkeras.collectives import reductions, scattering
from hvkeras.collectives.broadcasts import broadcast_global_variables
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.operations import Adasum, Average, Sum
from hvkeras.diagnostics.timeline import start_timeline, stop_timeline
from hvkeras.gradients.optimizer import DistributedOptimizer
from hvkeras.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvkeras.job.queries import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    sycl_built,
)
from hvkeras.job.session import is_initialized
from hvkeras.startup import init, shutdown
from hvkeras.training.model_loading import load_model
from hvkeras.typing import ArrayOrTensor, CompressorLike, Tensor, TensorLike

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "ProcessSet", "Sum", "add_process_set", "allgather",
    "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "init", "is_initialized",
    "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank",
    "reducescatter", "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
    "sycl_built",
]


def allreduce(
    value: TensorLike, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: CompressorLike = Compression.none,
) -> ArrayOrTensor:
    """Reduce a value over all ranks, as `hvkeras.allreduce` does.

    Example:
        mean = hvd.allreduce(accuracy)

    Args:
        value: A number, array or tensor.
        name: Identifies the collective across ranks.
        average: Horovod's older alternative to `op`.
        prescale_factor: Factor applied to each rank's value before the reduction.
        postscale_factor: Factor applied to the result.
        op: Average (default) or another reduction.
        compression: How the value is compressed.

    Returns:
        The result as a NumPy value; a tensor inside `tf.function`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `hvkeras.allreduce`.
    """
    return _value(reductions.allreduce(value, average=average, op=op, prescale_factor=prescale_factor,
                                        postscale_factor=postscale_factor, compression=compression, name=name))


def allgather(value: TensorLike, name: str | None = None) -> ArrayOrTensor:
    """Concatenate the ranks' values, as `hvkeras.allgather` does.

    Example:
        everyone = hvd.allgather([hvd.rank()])

    Args:
        value: An array or tensor.
        name: Identifies the collective across ranks.

    Returns:
        The result as a NumPy array; a tensor inside `tf.function`.

    Raises:
        NotInitializedError: `init()` was not called.
    """
    return _value(reductions.allgather(value, name=name))


def broadcast(value: TensorLike, root_rank: int, name: str | None = None) -> ArrayOrTensor:
    """Broadcast a value from the root to every rank, as `hvkeras.broadcast` does.

    Example:
        seed = hvd.broadcast(seed, root_rank=0)

    Args:
        value: A number, array or tensor.
        root_rank: The rank that sends.
        name: Identifies the collective across ranks.

    Returns:
        The root's value as a NumPy value; a tensor inside `tf.function`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root does not exist.
    """
    return _value(reductions.broadcast(value, root_rank, name=name))


def reducescatter(value: TensorLike, name: str | None = None, op: int = Average) -> ArrayOrTensor:
    """Reduce a value over all ranks and give each rank its part of the rows, as `hvkeras.reducescatter` does.

    Example:
        part = hvd.reducescatter(statistics)

    Args:
        value: An array or tensor.
        name: Identifies the collective across ranks.
        op: Average or Sum.

    Returns:
        This rank's rows as a NumPy array; a tensor inside `tf.function`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `hvkeras.reducescatter`.
    """
    return _value(scattering.reducescatter(value, op=op, name=name))


def _value(tensor: Tensor) -> ArrayOrTensor:
    return tensor.numpy() if hasattr(tensor, "numpy") else tensor


from hvkeras.tensorflow.keras import callbacks, elastic  # noqa: E402 - submodules, as Horovod users expect
