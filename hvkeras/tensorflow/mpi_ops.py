"""Alias module for `horovod.tensorflow.mpi_ops`: the names that scripts and tests import from it."""

from __future__ import annotations

from collections.abc import Sequence

from hvkeras.collectives.broadcasts import broadcast_
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
from hvkeras.common.basics import HorovodBasics
from hvkeras.common.util import num_rank_is_power_2
from hvkeras.diagnostics.timeline import start_timeline, stop_timeline
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.queries import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
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
from hvkeras.tensorflow import util
from hvkeras.typing import Tensor, TensorLike

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "allgather", "alltoall", "barrier", "broadcast",
    "broadcast_", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "num_rank_is_power_2", "process_set_included_op", "rank", "rank_op", "rocm_built", "shutdown", "size", "size_op",
    "start_timeline", "stop_timeline", "sycl_built",
]


# The names below are private in Horovod, but scripts and libraries use them. The functions compute a sum by default.
_basics, _executing_eagerly = HorovodBasics(__file__), util._executing_eagerly


def _allreduce(tensor: TensorLike, name: str | None = None, op: int = Sum, prescale_factor: float = 1.0,
               postscale_factor: float = 1.0, ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
               process_set: ProcessSet = global_process_set) -> Tensor:
    return allreduce(tensor, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, name=name,
                     process_set=process_set)


def _grouped_allreduce(tensors: Sequence[TensorLike], name: str | None = None, op: int = Sum,
                       prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
                       process_set: ProcessSet = global_process_set) -> list[Tensor]:
    return grouped_allreduce(tensors, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
                             process_set=process_set, name=name)


def _reducescatter(tensor: TensorLike, name: str | None = None, op: int = Sum,
                   ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
                   process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                   postscale_factor: float = 1.0) -> Tensor:
    return reducescatter(tensor, op=op, name=name, process_set=process_set, prescale_factor=prescale_factor,
                         postscale_factor=postscale_factor)


def _grouped_reducescatter(tensors: Sequence[TensorLike],
                           name: str | None = None,  # noqa: ARG001 - Horovod's parameter
                           op: int = Sum, ignore_name_scope: bool = False,  # noqa: ARG001 - Horovod's parameter
                           process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                           postscale_factor: float = 1.0) -> list[Tensor]:
    return grouped_reducescatter(tensors, op=op, process_set=process_set, prescale_factor=prescale_factor,
                                 postscale_factor=postscale_factor)
