"""Files: durable writes that survive a crash or power loss, private files, free disk space, and names of commits."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

_PREFIX = "commit-"


def commit_path(folder: Path, number: int) -> Path:
    """Returns the file of the last commit of the script's `number`-th state."""
    return folder / f"{_PREFIX}{number}"


def remove_commits(folder: Path) -> None:
    """Removes all commits of a job that has completed.

    Args:
        folder: Where they are; it may be missing.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_TEXT = re.compile(r"\berrno = (\d+)")  # HDF5 reports it within a longer text, and not always as an OSError


def room_left(path: Path) -> int | None:
    """Returns the free bytes on the disk of a file or folder; None if they cannot be determined.

    Args:
        path: The file or folder, which need not exist.
    """
    for index in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(index).free
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
