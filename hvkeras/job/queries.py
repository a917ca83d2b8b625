"""Horovod's query functions: ranks and sizes of the running job, and build features of its engine."""

from __future__ import annotations

from hvkeras.backends import importable_backends
from hvkeras.host.topology import Topology
from hvkeras.job.autograph import exclude_from_autograph
from hvkeras.job.session import current_session


def _topology() -> Topology:
    return current_session().topology


def rank() -> int:
    """Return this process's rank, from 0 to `size() - 1`.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().rank


def size() -> int:
    """Return the number of processes that train together.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().size


def local_rank() -> int:
    """Return this process's rank among the processes on its host, for example to choose a GPU.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that have a process with this local rank.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().cross_size


def is_homogeneous() -> bool:
    """Return whether every host runs the same number of ranks.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return _topology().is_homogeneous


def mpi_built() -> bool:
    """Return whether the engine of an installed backend, such as Horovod, was built with MPI."""
    return _is_built_with("MPI")


def gloo_built() -> bool:
    """Return whether the engine of an installed backend, such as Horovod, was built with Gloo."""
    return _is_built_with("Gloo")


def mpi_enabled() -> bool:
    """Return whether the running engine is Horovod over MPI.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return current_session().backend.transport == "MPI"


def gloo_enabled() -> bool:
    """Return whether the running engine is Horovod over Gloo.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return current_session().backend.transport == "Gloo"


def mpi_threads_supported() -> bool:
    """Return whether MPI is running and may be called from several threads at once.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    if not mpi_enabled():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def nccl_built() -> int:
    """Return 1 if the engine of an installed backend, such as Horovod, was built with NCCL, else 0."""
    return int(_is_built_with("NCCL"))


def cuda_built() -> bool:
    """Return whether the installed TensorFlow was built with CUDA."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether the installed TensorFlow was built with ROCm."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_rocm())


def ccl_built() -> bool:
    """Return whether oneCCL can be used: always False, since no backend of hvkeras includes it."""
    return False


def ddl_built() -> bool:
    """Return whether IBM's DDL can be used: always False, since no backend of hvkeras includes it."""
    return False


def sycl_built() -> bool:
    """Return whether SYCL can be used: always False, since no backend of hvkeras includes it."""
    return False


def _is_built_with(library: str) -> bool:
    return any(library in backend.built_with() for backend in importable_backends().values())


def gpu_available(*args: object, **kwargs: object) -> bool:  # noqa: ARG001 - Horovod's parameters
    """Return whether TensorFlow sees a GPU.

    Args:
        *args: Accepted for compatibility with Horovod, which takes the name of its extension.
        **kwargs: Accepted for the same reason.
    """
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


exclude_from_autograph(__name__)
