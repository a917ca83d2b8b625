"""Files and folders that only this user may change."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_not_private(found: os.stat_result, forbidden: int = OTHERS_WRITE) -> str:
    """Explains why others can change, or otherwise use, a file or folder.

    Args:
        found: The owner and mode of the file or folder.
        forbidden: The mode bits that must not be set.

    Returns:
        The reason, such as `it belongs to user 0`; "" if only this user can.
    """
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    mode = stat.S_IMODE(found.st_mode)
    return f"its mode is {mode:04o}" if mode & forbidden else ""


def create_private(path: Path) -> BinaryIO:
    """Opens a new file that only this user may read and write, and replaces an existing one."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def read_private(path: Path) -> bytes:
    """Reads a file that others cannot have written.

    Raises:
        PermissionError: Others can have written it.
        OSError: It cannot be read, or is a symbolic link.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        reason = why_not_private(found) or ("" if stat.S_ISREG(found.st_mode) else "it is not a regular file")
        if reason:
            raise PermissionError(reason)
        return file.read()
