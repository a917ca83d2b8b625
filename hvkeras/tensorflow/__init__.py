"""Alias module for `horovod.tensorflow`: the flat API of hvkeras, with Horovod's signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.errors import require_tensorflow

require_tensorflow()

import tensorflow as tf

from hvkeras.collectives.broadcasts import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.join import join
from hvkeras.collectives.operations import Adasum, Average, Max, Min, Product, Sum
from hvkeras.collectives.rank_ops import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from hvkeras.collectives.reductions import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
)
from hvkeras.collectives.scattering import alltoall, grouped_reducescatter, reducescatter
from hvkeras.diagnostics.timeline import start_timeline, stop_timeline
from hvkeras.errors import UnsupportedError, explain
from hvkeras.gradients.optimizer import DistributedOptimizer as _KerasOptimizer
from hvkeras.gradients.options import ReductionOptions, checked_groups, chosen_compression
from hvkeras.gradients.sessions import BroadcastGlobalVariablesHook, distribute_of_tensorflow_1
from hvkeras.gradients.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvkeras.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvkeras.job.queries import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    is_homogeneous,
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
from hvkeras.tensorflow.mpi_ops import _allreduce as _allreduce  # as in Horovod; scripts import it from here
from hvkeras.tensorflow.mpi_ops import _grouped_allreduce as _grouped_allreduce
from hvkeras.tensorflow.mpi_ops import _grouped_reducescatter as _grouped_reducescatter
from hvkeras.tensorflow.mpi_ops import _reducescatter as _reducescatter
from hvkeras.tensorflow.util import _executing_eagerly as _executing_eagerly
from hvkeras.training.sync_batch_norm import sync_batch_normalization
from hvkeras.typing import CompressorLike, OptimizerT, VariableLike

if TYPE_CHECKING:
    from hvkeras.training.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape",
    "DistributedOptimizer", "Max", "Min", "PartialDistributedGradientTape", "ProcessSet", "Product", "Sum",
    "SyncBatchNormalization", "add_process_set", "allgather", "allgather_object", "allreduce", "alltoall", "barrier",
    "broadcast", "broadcast_", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
    "broadcast_variables", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "global_process_set", "gloo_built", "gloo_enabled", "gpu_available", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_rank_op",
    "local_size", "local_size_op", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "process_set_included_op", "rank", "rank_op", "reducescatter", "remove_process_set", "rocm_built", "shutdown",
    "size", "size_op", "start_timeline", "stop_timeline", "sycl_built",
]

_LegacyOptimizer = tf.compat.v1.train.Optimizer  # as in Horovod; scripts import it from here


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "SyncBatchNormalization":  # the class depends on the Keras version, which is chosen on first use
            return sync_batch_normalization()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def DistributedOptimizer(  # noqa: N802 - Horovod's public name
    optimizer: OptimizerT, name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001 - Horovod's parameter
    device_dense: str = "", device_sparse: str = "", compression: CompressorLike = Compression.none,
    sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False, num_groups: int = 0,
    groups: int | Sequence[Sequence[VariableLike]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True, compile_update: bool | str = "auto", shard_update: bool | str = "auto",
) -> OptimizerT:
    """Distribute an optimizer; `hvkeras.DistributedOptimizer` with the parameter order of `horovod.tensorflow`.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    Args:
        optimizer: A Keras optimizer, or a `tf.compat.v1.train.Optimizer`.
        name: As for `hvkeras.DistributedOptimizer`, like all parameters except `use_locking`.
        use_locking: Accepted for compatibility with Horovod; the optimizer's own setting applies.
        device_dense: See `hvkeras.DistributedOptimizer`.
        device_sparse: See `hvkeras.DistributedOptimizer`.
        compression: See `hvkeras.DistributedOptimizer`.
        sparse_as_dense: See `hvkeras.DistributedOptimizer`.
        backward_passes_per_step: See `hvkeras.DistributedOptimizer`.
        op: See `hvkeras.DistributedOptimizer`.
        gradient_predivide_factor: See `hvkeras.DistributedOptimizer`.
        average_aggregated_gradients: See `hvkeras.DistributedOptimizer`.
        num_groups: See `hvkeras.DistributedOptimizer`.
        groups: See `hvkeras.DistributedOptimizer`.
        process_set: See `hvkeras.DistributedOptimizer`.
        scale_local_gradients: See `hvkeras.DistributedOptimizer`.
        compile_update: See `hvkeras.DistributedOptimizer`; optimizers of TensorFlow 1 have fused kernels already.
        shard_update: See `hvkeras.DistributedOptimizer`; not for optimizers of TensorFlow 1.

    Returns:
        The optimizer.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `hvkeras.DistributedOptimizer`.
        UnsupportedError: As for `hvkeras.DistributedOptimizer`.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if shard_update not in ("auto", False):
            raise UnsupportedError(explain("shard_update supports optimizers of Keras, not of TensorFlow 1",
                                           "leave it out", optimizer=type(optimizer).__name__))
        exchange = ReductionOptions(
            name or type(optimizer).__name__, op, chosen_compression(compression), sparse_as_dense,
            gradient_predivide_factor, checked_groups(num_groups, groups), process_set, scale_local_gradients,
            device_dense, device_sparse)
        return distribute_of_tensorflow_1(optimizer, exchange, backward_passes_per_step)
    return _KerasOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step, average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups, groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
        compile_update=compile_update, shard_update=shard_update,
    )


from hvkeras.tensorflow import elastic  # a submodule, as Horovod users expect
