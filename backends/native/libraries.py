"""Locates the C++ libraries of the native engine."""

from __future__ import annotations

import sys
from pathlib import Path


def path_of(name: str) -> Path:
    """Returns the path of a library file, the newest one if there are several. The file need not exist.

    If hvkeras is installed with `pip install -e`, the package has two folders: the folder of the sources, and the
    folder into which the libraries were built.

    Args:
        name: The name of the file.
    """
    folders = [Path(folder) for folder in sys.modules[__package__].__path__]
    built = [folder / name for folder in folders if (folder / name).is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=folders[0] / name)
