"""Where the native engine's C++ libraries are."""

from __future__ import annotations

import sys
from pathlib import Path


def path_of(name: str) -> Path:
    """The file of a library, the newest where there are several; it need not be there.

    Where hvkeras is installed with `pip install -e`, the package has two folders: that of the sources, and the one into
    which the libraries were built.

    Args:
        name: The file's name.
    """
    folders = [Path(folder) for folder in sys.modules[__package__].__path__]
    built = [folder / name for folder in folders if (folder / name).is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=folders[0] / name)
