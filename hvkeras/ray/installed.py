"""Ray itself, imported when it is needed."""

from __future__ import annotations

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
