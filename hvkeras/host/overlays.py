"""Overlays: mounts over folders, in a mount namespace of this process, that take all of its changes."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE
_DETACH = 2  # MNT_DETACH


@dataclass(frozen=True)
class Overlay:
    """An overlay over a folder.

    Attributes:
        folder: The folder.
        common: An empty folder, at which the folder itself remains accessible.
        seen: What the folder contains below the overlay.
        live: Relative paths of folders that contain what the folder itself does instead; "" for all of it.
    """

    folder: Path
    common: Path
    seen: Path
    live: Sequence[str]


def mount_overlays(overlays: Sequence[Overlay], own: Path) -> None:
    """Mount overlays for this process, which must have a single thread, and for its future children.

    Args:
        own: Folder for the changes.

    Raises:
        OSError: Mounts are not permitted. Nothing is mounted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mounted: list[Path] = []

    def checked(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def mount(source: Path, target: Path, kind: str, flags: int, options: str = "") -> None:
        checked(libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags),
                           options.encode() or None))
        mounted.append(target)

    def overlay(lower: Path, target: Path, name: str) -> None:
        upper, work = own / f"upper.{name}", own / f"work.{name}"
        upper.mkdir()
        work.mkdir()
        shutil.copymode(lower, upper)
        paths = ",".join(f"{key}={_escaped(path)}" for key, path in (
            ("lowerdir", lower), ("upperdir", upper), ("workdir", work)))
        mount(target, target, "overlay", 0, paths + extra)

    extra = _enter_namespace(libc, checked)
    checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None))
    try:
        for number, each in enumerate(overlays):
            mount(each.folder, each.common, "", _BIND | _RECURSIVE)
            if "" not in each.live:
                overlay(each.seen, each.folder, str(number))
            for index, relative in enumerate(each.live):
                overlay(each.common / relative, each.folder / relative, f"{number}.{index}")
    except OSError:  # such as where the folder for temporary files is an overlay itself
        for target in reversed(mounted):
            detach(target)
        raise


def detach(target: Path) -> None:
    """Detach what is mounted on a folder; ignored if this process may not."""
    ctypes.CDLL(None).umount2(os.fsencode(target), _DETACH)


def _enter_namespace(libc: Any, checked: Callable[[int], None]) -> str:
    """Enter a new mount namespace; return the options that overlays need there."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS) == 0:
        return ""
    checked(libc.unshare(_NEW_MOUNTS | _NEW_USER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return ",userxattr"


def _escaped(path: Path) -> str:
    return re.sub(r"([\\:,])", r"\\\1", str(path))
