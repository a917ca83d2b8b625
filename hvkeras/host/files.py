"""Files: durable writes, private files, free disk space, and names of commits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PREFIX = "commit-"


def commit_path(folder: Path, number: int) -> Path:
    """Return the path of the last commit of the script's `number`-th state."""
    return folder / f"{_PREFIX}{number}"


def remove_commits(folder: Path) -> None:
    """Remove all commits of a job that has completed.

    Args:
        folder: Folder of the commits; may be missing.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_TEXT = re.compile(r"\berrno = (\d+)")  # HDF5 has it within a longer text, and does not always raise an OSError


def room_left(path: Path) -> int | None:
    """Return the free bytes on the disk of a file or folder; None if unknown.

    Args:
        path: File or folder; may be missing.
    """
    for index in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(index).free
    return None


def why_full(error: BaseException | None) -> str:
    """Return the system's message if a full disk, quota or file size limit caused an error, else "".

    Args:
        error: The error, or one that was raised because of it.
    """
    while error is not None:
        found = _IN_TEXT.search(str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number in _FULL:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ""


_NO_FLUSH_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # on some network and user-space file systems


def replace_durably(unfinished: Path, path: Path, former: Path | None = None) -> None:
    """Rename a complete file, and flush both content and name to the disk.

    A rename alone is not durable: after a power loss, the new name may refer to an empty file.

    Args:
        unfinished: The complete file, on the same file system, preferably in the same folder.
        path: New name; an existing file is replaced.
        former: Name for the existing file; None to remove it. For a moment, only `former` exists.

    Raises:
        OSError: The file cannot be flushed; the existing file is intact.
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
    """Write a text file durably, see `replace_durably`.

    Raises:
        OSError: The file cannot be written; an existing file is intact.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("x", encoding="utf-8") as file:  # never follows a symbolic link of another user
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


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock within the `with` block, against processes on all hosts that share the folder.

    Args:
        path: The file to lock. It is created, with its folder, and removed afterwards.

    Raises:
        OSError: The file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # removed by the process that held the lock before
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    try:
                        yield
                    finally:
                        path.unlink()
                    return


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_not_private(found: os.stat_result, forbidden: int = OTHERS_WRITE) -> str:
    """Return the reason why other users can change, or otherwise use, a file or folder.

    Args:
        found: Result of `os.stat`.
        forbidden: Mode bits that must not be set.

    Returns:
        The reason, such as `it belongs to user 0`; "" if only this user has access.
    """
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    mode = stat.S_IMODE(found.st_mode)
    return f"its mode is {mode:04o}" if mode & forbidden else ""


_ATTEMPTS = 100  # in two milliseconds, as another process may remove the folder at the same time


def make_private(folder: Path) -> str:
    """Create a folder that no other user has access to, unless it exists.

    Returns:
        The reason why others can use or replace the existing one, or why there is none; "" if it is private.
    """
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = why_not_private(folder.stat(), 0o077)
            if folder.is_symlink() and (owner := folder.lstat().st_uid) != os.geteuid():
                reason = f"it is a symbolic link of user {owner}, who may change where it leads"
            if not reason and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                reason = "you cannot write to it"
        except OSError as error:
            reason = f"it cannot be created or accessed ({error.strerror})"
        if not reason:
            break
    return reason


def create_private(path: Path) -> BinaryIO:
    """Create a file that only this user may read and write; an existing file is replaced."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def read_private(path: Path) -> bytes:
    """Read a file that only this user may write.

    Raises:
        PermissionError: Other users may have written it.
        OSError: It cannot be read, or is a symbolic link.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        reason = why_not_private(found) or ("" if stat.S_ISREG(found.st_mode) else "it is not a regular file")
        if reason:
            raise PermissionError(reason)
        return file.read()
