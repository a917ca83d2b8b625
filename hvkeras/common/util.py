"""Alias module for `horovod.common.util`: Horovod's small helpers that scripts and tests import."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from packaging import version

from hvkeras.errors import UsageError, explain
from hvkeras.host.program import env
from hvkeras.job.queries import ccl_built, ddl_built, gloo_built, gpu_available, mpi_built, nccl_built

__all__ = ["ccl_built", "check_extension", "ddl_built", "env", "extension_available", "gloo_built", "gpu_available",
           "is_iterable", "is_version_greater_equal_than", "mpi_built", "nccl_built", "num_rank_is_power_2",
           "split_list"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's parameter
    """Return whether a framework is supported.

    Args:
        ext_base_name: `tensorflow`, `torch`, ...
        verbose: Accepted for compatibility with Horovod.
    """
    return ext_base_name in ("tensorflow", "keras")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str,  # noqa: ARG001 - Horovod's parameters
                    *args: str) -> None:  # noqa: ARG001 - Horovod's parameters
    """Raise ImportError for a framework that is not supported.

    Args:
        ext_name: `horovod.tensorflow`, ...
        ext_env_var: Accepted for compatibility with Horovod.
        pkg_path: Accepted for compatibility with Horovod.
        *args: Accepted for compatibility with Horovod.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"hvkeras supports TensorFlow and Keras, not {ext_name}")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, as Adasum requires.

    Args:
        num_rank: The number of ranks.
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[list[Any]]:  # noqa: E741 - Horovod's parameter
    """Split a list into parts whose lengths differ by at most one.

    Args:
        l: The list.
        n: The number of parts.
    """
    each, more = divmod(len(l), n)
    starts = [number * each + min(number, more) for number in range(n + 1)]
    return [list(l[start:stop]) for start, stop in itertools.pairwise(starts)]


def is_iterable(x: object) -> bool:
    """Return whether an object is iterable.

    Args:
        x: The object.
    """
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is equal to or later than another.

    Example:
        >>> is_version_greater_equal_than("2.10.0", "2.9.1")
        True

    Args:
        ver: The version, such as `tf.__version__`.
        target: The version to compare with, as major.minor.patch.

    Raises:
        UsageError: `target` does not have this form.
    """
    if target.count(".") != 2:
        raise UsageError(explain("target must be a version of three numbers", "write it like 2.10.0", target=target))
    return version.parse(ver) >= version.parse(target)
