"""Versions that ranks compare at the start."""

from __future__ import annotations

import sys
from importlib import metadata

from hvkeras import __version__

_DISTRIBUTIONS = {"TensorFlow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel"), "Keras": ("keras",)}


def own_versions() -> dict[str, str]:
    """Return the installed versions of Python, hvkeras, TensorFlow and Keras, without importing them."""
    found = {"Python": sys.version.split()[0], "hvkeras": __version__}
    for title, names in _DISTRIBUTIONS.items():
        for name in names:
            try:
                found[title] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def must_agree(versions: dict[str, str]) -> dict[str, str]:
    """Return the versions that must be equal on all ranks: hvkeras, and Python up to the minor number."""
    return {"Python": ".".join(versions.get("Python", "").split(".")[:2]), "hvkeras": versions.get("hvkeras", "")}
