"""The twin of `horovod.common.basics`: what `mpi_ops._basics` is, through which scripts ask for numbers and sets."""

from __future__ import annotations

from typing import Any

from hvkeras import context, numbers, timeline
from hvkeras.operations import Adasum, Average, Max, Min, Product, Sum
from hvkeras.process_sets import add_process_set, process_set_of, registered_process_sets, remove_process_set

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's plain functions as methods; process sets are told by their numbers.

    Example:
        basics = HorovodBasics("")
        basics.init()
        print(basics.rank(), basics.size())

    Args:
        pkg_path: Accepted for Horovod's sake, like all that follow.
        *args: See there.
    """

    Average, Sum, Adasum, Min, Max, Product = Average, Sum, Adasum, Min, Max, Product
    init = staticmethod(context.init)
    shutdown = staticmethod(context.shutdown)
    is_initialized = staticmethod(context.is_initialized)
    rank = staticmethod(numbers.rank)
    size = staticmethod(numbers.size)
    local_rank = staticmethod(numbers.local_rank)
    local_size = staticmethod(numbers.local_size)
    cross_rank = staticmethod(numbers.cross_rank)
    cross_size = staticmethod(numbers.cross_size)
    is_homogeneous = staticmethod(numbers.is_homogeneous)
    mpi_threads_supported = staticmethod(numbers.mpi_threads_supported)
    mpi_enabled = staticmethod(numbers.mpi_enabled)
    mpi_built = staticmethod(numbers.mpi_built)
    gloo_enabled = staticmethod(numbers.gloo_enabled)
    gloo_built = staticmethod(numbers.gloo_built)
    nccl_built = staticmethod(numbers.nccl_built)
    ddl_built = staticmethod(numbers.ddl_built)
    ccl_built = staticmethod(numbers.ccl_built)
    cuda_built = staticmethod(numbers.cuda_built)
    rocm_built = staticmethod(numbers.rocm_built)
    sycl_built = staticmethod(numbers.sycl_built)
    start_timeline = staticmethod(timeline.start_timeline)
    stop_timeline = staticmethod(timeline.stop_timeline)

    def __init__(self, pkg_path: str, *args: Any) -> None:
        """Needs nothing: there is one job, whatever the path."""

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
