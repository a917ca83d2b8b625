"""Collective engines, one folder each, behind the interface `hvkeras.backends.interface.Backend`.

This folder is installed as `hvkeras.backends`.

Third parties add backends through the entry-point group `hvkeras.backends`. The name of an entry point is the name of
the backend, and its value is a subclass of `Backend`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from importlib import metadata

from hvkeras.backends.capabilities import HostsStrategies
from hvkeras.backends.interface import Backend
from hvkeras.errors import MachineError, UsageError, explain

ENTRY_POINTS = "hvkeras.backends"

# In the order in which help and errors list the names.
BUILT_IN = {
    "native": ("hvkeras.backends.native", "NativeBackend"),
    "horovod": ("hvkeras.backends.horovod", "HorovodBackend"),
    "tfdist": ("hvkeras.backends.tfdist", "TfdistBackend"),
    "local": ("hvkeras.backends.local", "LocalBackend"),
}


ONE_PROCESS = "local"  # for jobs of one process, which do not communicate


def backend_names() -> list[str]:
    """Return the names of all backends, the built-in ones first."""
    plugged = sorted(point.name for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in BUILT_IN)
    return [*BUILT_IN, *plugged]


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend.

    Args:
        name: One of `backend_names()`.

    Raises:
        UsageError: There is no backend of this name.
        MachineError: The backend's package cannot be imported, or its entry point is not a `Backend` of this name.
    """
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _plugged(point)
    raise _unknown_backend(name)


def require_backend_name(name: str) -> None:
    """Check that there is a backend of this name, without importing it.

    Args:
        name: `auto`, or a name as for `backend_class`.

    Raises:
        UsageError: There is none.
    """
    if name not in ("auto", *backend_names()):
        raise _unknown_backend(name)


def _unknown_backend(name: str) -> UsageError:
    known = ["auto", *backend_names()]
    near = difflib.get_close_matches(name, known, n=1)
    return UsageError(explain("The backend must be one of " + ", ".join(known), f"did you mean {near[0]}" if near else
                              "pass one of these names to init(), --backend or HVKERAS_BACKEND", backend=name))


def _plugged(point: metadata.EntryPoint) -> type[Backend]:
    try:
        found: type[Backend] = point.load()
    except Exception as error:
        raise MachineError(explain(f"The backend {point.name!r} cannot be imported ({type(error).__name__}: {error})",
                                   "fix the import, or install or uninstall its package",
                                   entry_point=point.value)) from error
    if not (isinstance(found, type) and issubclass(found, Backend)) or found.name != point.name:
        raise MachineError(explain(f"The entry point {point.name!r} must be a subclass of hvkeras.backends.interface."
                                   f"Backend whose name is {point.name!r}", "correct the package's entry point, or the"
                                   " class's name", entry_point=point.value, name=getattr(found, "name", None)))
    return found


def importable_backends() -> dict[str, type[Backend]]:
    """Return the classes of all backends by name, except plug-ins that cannot be imported."""
    found = {}
    for name in backend_names():
        with contextlib.suppress(MachineError):
            found[name] = backend_class(name)
    return found


def backend_for_strategies() -> str:
    """Return the name of the first built-in backend that inherits from `HostsStrategies`."""
    return next(name for name in BUILT_IN if issubclass(backend_class(name), HostsStrategies))
