"""Files of a stack: which of them are the user's, and how messages name their lines."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_STANDARD = str(Path(os.__file__).parent) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # Debian's is the latter
# the second may be installed separately from the first
_PACKAGES = ("hvkeras", "hvkeras.backends", "tensorflow", "keras", "tf_keras")


@functools.cache
def folders_of(package: str) -> tuple[str, ...]:
    """Return the folders of a package's files, each with a trailing separator; () if the package is not installed.

    An editable install also searches the folder around the sources; that one belongs to the user and is omitted.

    Args:
        package: Its name; the package need not be imported.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return tuple(str(folder) + os.sep for folder in folders if (Path(folder) / "__init__.py").is_file())


@functools.cache
def is_library(path: str) -> bool:
    """Return whether a file belongs to hvkeras, TensorFlow, Keras or Python.

    Args:
        path: The file, as in a frame.
    """
    standard = path.startswith(_STANDARD) and not any(name in path for name in _INSTALLED)
    return standard or path.startswith("<frozen") or any(path.startswith(folders_of(name)) for name in _PACKAGES)


def short(path: str) -> str:
    """Return a path relative to the folder in which packages are installed, or to the current folder.

    Args:
        path: The file, as in a frame.
    """
    folders = list(_INSTALLED)
    with contextlib.suppress(FileNotFoundError):  # the current folder may have been removed
        folders.append(os.getcwd() + os.sep)
    for folder in folders:
        path = path.rpartition(folder)[2]
    return path


def frame_text(path: str, line: int | None, function: str) -> str:
    """Format a line of code for messages: `train.py:31 in step`."""
    return f"{short(path)}:{line} in {function or '<lambda>'}"  # AutoGraph turns lambdas into unnamed functions


def innermost(stack: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost line of user code in a stack; "" if there is none.

    Args:
        stack: The file, line and function of each frame, the innermost first.
    """
    return next((short_frame_text(*frame) for frame in stack if not is_library(frame[0])), "")


def innermost_of_user(stack: Sequence[tuple[str, int, str]]) -> str:
    """Return the innermost line of the user's own files, not of installed packages; else as `innermost`.

    Args:
        stack: The file, line and function of each frame, the innermost first.
    """
    return innermost(frame for frame in stack if not any(name in frame[0] for name in _INSTALLED)) or innermost(stack)


short_frame_text = functools.lru_cache(maxsize=1024)(frame_text)
