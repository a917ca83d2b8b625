"""Targets of patches: attributes of other packages' modules and classes, whose places differ between versions.

A target is written `module:Class.attribute`. In each place, `a|b` means `a`, or `b` where there is no `a`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any


def find(target: str, modules: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the owner of a target (None if there is none), and the name of the attribute, which may be missing.

    Args:
        target: The target.
        modules: The only modules to look in; by default, modules are imported.
    """
    *path, attribute = target.partition(":")[2].split(".")
    candidates = map(_imported if modules is None else modules.get, _module_names(target))
    owner = next((module for module in candidates if module is not None), None)
    for names in path:
        owner = getattr(owner, _existing(owner, names), None)
    return owner, _existing(owner, attribute)


def package_of(target: str) -> str:
    """Return the package of a target."""
    return target.partition(":")[0].partition(".")[0]


def is_in(target: str, modules: Collection[str]) -> bool:
    """Return whether a target is in one of the modules."""
    return any(name in modules for name in _module_names(target))


def _module_names(target: str) -> list[str]:
    return target.partition(":")[0].split("|")


def _existing(owner: Any, names: str) -> str:
    first, *others = names.split("|")
    return next((name for name in (first, *others) if hasattr(owner, name)), first)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
