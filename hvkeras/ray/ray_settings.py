"""Settings of executors on Ray, as `create_settings` makes them, and the import of Ray on demand."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvkeras.errors import NotInstalledError, UnsupportedError, explain


def require_ray() -> Any:
    """Imports Ray.

    Raises:
        NotInstalledError: It is not installed.
        UnsupportedError: This process is a client of the cluster, and no part of it.
    """
    try:
        import ray
    except ImportError:
        raise NotInstalledError(explain("Ray must be installed for hvkeras.ray",
                                        "pip install 'hvkeras[ray]'")) from None
    if ray.util.client.ray.is_connected():
        raise UnsupportedError(explain("An executor must run on a node of the Ray cluster, whose workers connect to it",
                                       "call it inside a function with @ray.remote, or submit the script by ray job"
                                       " submit, instead of ray.init('ray://...')"))
    return ray


@dataclass
class RaySettings:
    """What executors are configured with, beside the number of workers.

    Attributes:
        timeout_s: Seconds within which the workers' processes must start, once Ray has placed them.
        placement_group_timeout_s: Seconds to wait until the cluster has room for all workers.
        nics: The network interfaces between hosts; None for what reaches the driver's host.
        min_num_proc: For elastic executors, the fewest workers to train with.
        max_num_proc: For elastic executors, the most workers to train with.
        reset_limit: For elastic executors, how often the workers may change; None without a limit.
        elastic_timeout: For elastic executors, seconds to wait until there is room for the fewest workers.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: tuple[str, ...] | None = None
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600


def interfaces(nics: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Reads Horovod's parameter for network interfaces: a list, a set, or names separated by commas."""
    if nics is None:
        return None
    return tuple(sorted(nics.split(",") if isinstance(nics, str) else nics))


def warn_of_ignored(**given: object) -> None:
    """Warns of Horovod's settings that have no effect here, to the caller of `create_settings`."""
    if names := ", ".join(name for name, value in given.items() if value):
        warnings.warn(f"hvkeras.ray ignores {names}: workers are started by Ray, without ssh", stacklevel=3)
