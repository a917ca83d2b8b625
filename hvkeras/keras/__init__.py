"""Alias module for `horovod.keras`: `hvkeras.tensorflow.keras`, except that `allreduce` has `average=True`."""

from __future__ import annotations

from hvkeras.errors import require_tensorflow

require_tensorflow()

from hvkeras.collectives.compression import Compression
from hvkeras.gradients.optimizer import PartialDistributedOptimizer
from hvkeras.tensorflow import keras as _tf_keras
from hvkeras.tensorflow.keras import (
    Adasum,
    Average,
    DistributedOptimizer,
    ProcessSet,
    Sum,
    add_process_set,
    allgather,
    broadcast,
    broadcast_global_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    load_model,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    sycl_built,
)
from hvkeras.typing import ArrayOrTensor, CompressorLike, TensorLike

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "ProcessSet", "Sum",
    "add_process_set", "allgather", "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built",
    "gloo_enabled", "init", "is_initialized", "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "reducescatter", "remove_process_set", "rocm_built", "shutdown",
    "size", "start_timeline", "stop_timeline", "sycl_built",
]


def allreduce(
    value: TensorLike, name: str | None = None, average: bool = True, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: CompressorLike = Compression.none,
) -> ArrayOrTensor:
    """Reduce a value over all ranks, as `hvkeras.allreduce` does.

    Example:
        mean = hvd.allreduce(accuracy)

    Args:
        value: A number, array or tensor.
        name: Identifies the collective across ranks.
        average: Whether to average instead of sum; `op` takes precedence if given.
        prescale_factor: Factor applied to each rank's value before the reduction.
        postscale_factor: Factor applied to the result.
        op: Average or another reduction.
        compression: How the value is compressed.

    Returns:
        The result as a NumPy value; a tensor inside `tf.function`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `hvkeras.allreduce`.
    """
    return _tf_keras.allreduce(value, name, average if op is None else None, prescale_factor, postscale_factor, op,
                               compression)


from hvkeras.keras import callbacks, elastic  # submodules, as Horovod users expect
