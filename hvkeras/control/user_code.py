"""Finds the frames of a stack that are the user's own code, and names them in messages."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_STANDARD = str(Path(os.__file__).parent) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # Debian's is the latter
_PACKAGES = ("hvkeras", "hvkeras.backends", "tensorflow", "keras", "tf_keras")  # the second may lie beside the first


@functools.cache
def folders_of(package: str) -> tuple[str, ...]:
    """The folders of a package's files, each with a trailing separator; () if the package is not installed.

    An editable install also searches the folder around the sources; that one belongs to the user and is left out.

    Args:
        package: Its name; the package need not be imported.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return tuple(str(folder) + os.sep for folder in folders if (Path(folder) / "__init__.py").is_file())


@functools.cache
def is_library(path: str) -> bool:
    """Whether a file belongs to hvkeras, TensorFlow, Keras or Python.

    Args:
        path: The file, as a frame names it.
    """
    standard = path.startswith(_STANDARD) and not any(name in path for name in _INSTALLED)
    return standard or path.startswith("<frozen") or any(path.startswith(folders_of(name)) for name in _PACKAGES)


def short(path: str) -> str:
    """A file's path relative to the folder in which packages are installed, or to the current folder.

    Args:
        path: The file, as a frame names it.
    """
    folders = list(_INSTALLED)
    with contextlib.suppress(FileNotFoundError):  # the current folder may have been removed
        folders.append(os.getcwd() + os.sep)
    for folder in folders:
        path = path.rpartition(folder)[2]
    return path


def place(path: str, line: int | None, function: str) -> str:
    """Names a line of code in messages: `train.py:31 in step`."""
    return f"{short(path)}:{line} in {function or '<lambda>'}"  # AutoGraph turns lambdas into unnamed functions


def call_site() -> str:
    """The line of the user's code from which this thread is being called; "" if there is none.

    In eager mode, this takes a few microseconds.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def innermost(stack: Iterable[tuple[str, int, str]]) -> str:
    """The innermost line of the user's code in a stack; "" if there is none.

    Args:
        stack: The file, line and function of each frame, the innermost first.
    """
    return next((_place(*frame) for frame in stack if not is_library(frame[0])), "")


_place = functools.lru_cache(maxsize=1024)(place)
