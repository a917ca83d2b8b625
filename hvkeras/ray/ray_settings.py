"""Settings of executors on Ray, as returned by `create_settings`, and the lazy import of Ray."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvkeras.errors import NotInstalledError, UnsupportedError, explain


def require_ray() -> Any:
    """Import Ray.

    Raises:
        NotInstalledError: Ray is not installed.
        UnsupportedError: This process is connected to the cluster by Ray Client.
    """
    try:
        import ray
    except ImportError:
        raise NotInstalledError(explain("Ray must be installed for hvkeras.ray",
                                        "pip install 'hvkeras[ray]'")) from None
    if ray.util.client.ray.is_connected():
        raise UnsupportedError(explain("An executor must run on a node of the Ray cluster, whose workers connect to it",
                                       "call it in a function decorated with @ray.remote, or submit the script with ray"
                                       " job submit, instead of ray.init('ray://...')"))
    return ray


@dataclass
class RaySettings:
    """Settings of executors. The last four are for elastic executors.

    Attributes:
        timeout_s: Seconds within which the workers' processes must start after Ray has placed them.
        placement_group_timeout_s: Seconds to wait for resources for all workers.
        nics: The network interfaces between hosts; None for the interface that routes to the driver's host.
        min_num_proc: The minimum number of workers.
        max_num_proc: The maximum number of workers; None for as many as the cluster has resources for.
        reset_limit: The maximum number of resets; None for no limit.
        elastic_timeout: Seconds to wait for resources for the minimum number of workers.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: tuple[str, ...] | None = None
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600


def interfaces(nics: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return network interfaces as a sorted tuple, from an iterable or from names separated by commas."""
    if nics is None:
        return None
    return tuple(sorted(nics.split(",") if isinstance(nics, str) else nics))


def warn_of_ignored(**given: object) -> None:
    """Warn the caller of `create_settings` about Horovod's settings that have no effect."""
    if names := ", ".join(name for name, value in given.items() if value):
        warnings.warn(f"hvkeras.ray ignores {names}: workers are started by Ray, without ssh", stacklevel=3)
