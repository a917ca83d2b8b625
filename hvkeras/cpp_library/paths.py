"""Locates the C++ libraries that are built with hvkeras."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "hvkeras.backends.native"  # where the build installs them, beside their sources


def path_of(name: str) -> Path:
    """Returns the path of a library file, the newest one if there are several. The file need not exist.

    If hvkeras is installed with `pip install -e`, the package has two folders: the folder of the sources, and the
    folder into which the libraries were built.

    Args:
        name: The name of the file.
    """
    spec = find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec is not None else None) or ()]
    built = [folder / name for folder in folders if (folder / name).is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=(folders or [Path()])[0] / name)
