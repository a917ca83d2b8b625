"""Room on the disk: how much is left, and whether an error came of too little."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_TEXT = re.compile(r"\berrno = (\d+)")  # HDF5 tells of it within a longer text, and not always by an OSError


def room_left(path: Path) -> int | None:
    """The bytes that are free where a file or folder is; None if nobody can tell.

    Args:
        path: The file or folder, which need not be there.
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def why_full(error: BaseException | None) -> str:
    """What the system says of a disk, a quota or a file that takes no more; "" if an error did not come of that.

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
