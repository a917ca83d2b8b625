"""Files that outlive a crash and a power loss: at any moment, either the old content or the new one is there, whole."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_NO_FLUSH_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # as on some network and user-space file systems


def replace_durably(unfinished: Path, path: Path, former: Path | None = None) -> None:
    """Puts a complete file in place of another, or of none, and returns once both content and name are on the disk.

    A rename alone does not do that: after a power loss, the new name may stand for an empty file.

    Args:
        unfinished: The complete file, in the same folder or at least on the same file system.
        path: Its final name.
        former: The name under which what `path` was before is kept, and is alone for a moment.

    Raises:
        OSError: It cannot be written to the disk; what `path` was before is intact.
    """
    _flush(unfinished)
    if former is not None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, former)
    os.replace(unfinished, path)
    try:
        _flush(path.parent)
    except OSError as error:
        if error.errno not in _NO_FLUSH_OF_FOLDERS:
            raise


def write_durably(path: Path, text: str) -> None:
    """Writes a text file, as `replace_durably` does.

    Raises:
        OSError: It cannot be written; what was there before is intact.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("x", encoding="utf-8") as file:  # never through a link that somebody else has put there
            file.write(text)
        replace_durably(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
