"""Free space on the disk: how much is left, and whether an error was caused by a lack of it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_TEXT = re.compile(r"\berrno = (\d+)")  # HDF5 reports it within a longer text, and not always as an OSError


def room_left(path: Path) -> int | None:
    """Returns the free bytes on the disk of a file or folder; None if they cannot be determined.

    Args:
        path: The file or folder, which need not exist.
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def why_full(error: BaseException | None) -> str:
    """Returns the system's message for a full disk, quota or file; "" if that did not cause the error.

    Args:
        error: The error, or one that followed from it.
    """
    while error is not None:
        found = _IN_TEXT.search(str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number in _FULL:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ""
