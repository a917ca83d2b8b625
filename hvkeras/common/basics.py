"""Alias module for `horovod.common.basics`: the class of `mpi_ops._basics`, which scripts use for rank queries."""

from __future__ import annotations

from typing import Any

from hvkeras.collectives import operations
from hvkeras.diagnostics import timeline
from hvkeras.job import queries
from hvkeras.job.process_sets import add_process_set, process_set_of, registered_process_sets, remove_process_set
from hvkeras.job.session import is_initialized
from hvkeras.startup import init, shutdown

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's plain functions as methods; process sets are identified by their IDs.

    Example:
        basics = HorovodBasics("")
        basics.init()
        print(basics.rank(), basics.size())

    Args:
        pkg_path: Accepted for compatibility with Horovod.
        *args: Accepted for compatibility with Horovod.
    """

    Average: int = operations.Average
    Sum: int = operations.Sum
    Adasum: int = operations.Adasum
    Min: int = operations.Min
    Max: int = operations.Max
    Product: int = operations.Product
    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    is_initialized = staticmethod(is_initialized)
    rank = staticmethod(queries.rank)
    size = staticmethod(queries.size)
    local_rank = staticmethod(queries.local_rank)
    local_size = staticmethod(queries.local_size)
    cross_rank = staticmethod(queries.cross_rank)
    cross_size = staticmethod(queries.cross_size)
    is_homogeneous = staticmethod(queries.is_homogeneous)
    mpi_threads_supported = staticmethod(queries.mpi_threads_supported)
    mpi_enabled = staticmethod(queries.mpi_enabled)
    mpi_built = staticmethod(queries.mpi_built)
    gloo_enabled = staticmethod(queries.gloo_enabled)
    gloo_built = staticmethod(queries.gloo_built)
    nccl_built = staticmethod(queries.nccl_built)
    ddl_built = staticmethod(queries.ddl_built)
    ccl_built = staticmethod(queries.ccl_built)
    cuda_built = staticmethod(queries.cuda_built)
    rocm_built = staticmethod(queries.rocm_built)
    sycl_built = staticmethod(queries.sycl_built)
    start_timeline = staticmethod(timeline.start_timeline)
    stop_timeline = staticmethod(timeline.stop_timeline)

    def __init__(self, pkg_path: str, *args: Any) -> None:
        """Ignore the arguments: a process belongs to only one job."""

    def _add_process_set_impl(self, ranks: Any) -> int | None:
        return add_process_set(ranks).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        return process_set_id if remove_process_set(process_set_of(process_set_id)) else None

    def _process_set_rank(self, process_set_id: int) -> int | None:
        return process_set_of(process_set_id).rank()

    def _process_set_size(self, process_set_id: int) -> int | None:
        return process_set_of(process_set_id).size()

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {number: process_set.ranks for number, process_set in registered_process_sets().items()}
