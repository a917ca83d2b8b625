"""Private folders: a process works in a folder as it was at the start of the job, and its changes stay its own.

The first process of a job on a host takes a snapshot of the folder: copies of small files, and hard links to others.
The others mount it below an overlay, at the same path, in a mount namespace of their own. Where mounts are not
permitted, as in most containers, a process copies the snapshot and changes to it; its links are then symbolic. The
original folder remains accessible to all at another path.

An overlay over the folder itself would not do: it would show some of the files that others create in the meantime.

Everything is in one folder of the job, next to a lock file that all its processes share. Whoever acquires that lock
exclusively knows that they have ended, even if they were killed. Other users can guess these names, so both are in a
folder that only this user may access.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvkeras.errors import MachineError, explain
from hvkeras.host.files import make_private, why_not_private
from hvkeras.host.overlays import Overlay, detach, mount_overlays

ENTRIES = 5_000  # maximum size of a snapshot, in files; what exceeds it is overlaid as it is
_MOUNTS = 256  # maximum number of such larger folders
_SMALL, _COPIES = 64 * 1024, 200  # bytes up to which a file is copied, and the maximum number of copies
_POLL = 0.005  # seconds
_OWNED = re.compile(r"[0-9a-f]{16}\.owner")


@dataclass(frozen=True)
class PrivateFolders:
    """Private folders of this process.

    Attributes:
        own: Folder of this process, for its own use, within that of the job.
        lock: Descriptor of the lock that this process shares with the job's other processes.
        pairs: Each private folder, and the path at which the common folder is accessible.
        how: How they are private: `overlay`, `copy`, or `common` if they are not.
    """

    own: Path
    lock: int
    pairs: tuple[tuple[Path, Path], ...]
    how: str

    def common(self, path: str | os.PathLike[str]) -> Path:
        """Return the path in the common folder of a file or folder; its own path if it is not private."""
        absolute = Path(os.path.abspath(path))
        for private, common in self.pairs:
            if private == absolute or private in absolute.parents:
                return common / absolute.relative_to(private)
        return absolute

    @staticmethod
    def show(path: str | os.PathLike[str], common: Path) -> None:
        """Replace a private file or folder by one that others have written; remove it if there is none."""
        private = Path(os.path.abspath(path))
        if private.is_dir() and not private.is_symlink():
            shutil.rmtree(private)
        else:
            private.unlink(missing_ok=True)
        if not os.path.lexists(common):
            return
        private.parent.mkdir(parents=True, exist_ok=True)
        if common.is_dir() and not common.is_symlink():
            private.mkdir()
            for _ in _mirrored(common, private, common, links=False):
                pass
        else:
            _mirror_file(str(common), str(private), str(common), links=False)

    def leave(self) -> None:
        """Remove everything private, unless other processes of the job are still running."""
        with contextlib.suppress(OSError):
            os.close(self.lock)
        for _, common in self.pairs if self.how == "overlay" else ():
            detach(common)
        remove_abandoned()

    def to_text(self) -> str:
        """Return a text for an environment variable."""
        return json.dumps([str(self.own), self.lock, [[str(one) for one in pair] for pair in self.pairs], self.how])

    @classmethod
    def from_text(cls, text: str) -> PrivateFolders:
        """Return the folders that `to_text` has described."""
        own, lock, pairs, how = json.loads(text)
        return cls(Path(own), lock, tuple((Path(private), Path(common)) for private, common in pairs), how)


def enter(key: str, folders: Sequence[Path], keeps_common: bool, timeout: float) -> PrivateFolders | None:
    """Make folders private for this process, which must have a single thread, and for its future children.

    Args:
        key: Identifier of the job: 16 hexadecimal digits.
        folders: The folders. Those within others are ignored, and those that contain temporary files remain common.
        keeps_common: Whether this process works in the common folders. The others do not see what it writes.
        timeout: Seconds to wait for the process that takes the snapshot.

    Returns:
        The private folders; None if there is no place for them.

    Raises:
        MachineError: Other users can access the place.
    """
    place = _place()
    real = {folder.resolve() for folder in folders} - {place, *place.parents}
    tops = sorted(folder for folder in real if not real.intersection(folder.parents))
    job = place / key
    remove_abandoned()
    lock = _join(job, tops, time.monotonic() + timeout)
    if lock is None:
        return None
    os.set_inheritable(lock, True)
    own, here = Path(tempfile.mkdtemp(prefix="process-", dir=job)), Path.cwd()
    if keeps_common or not tops:
        return PrivateFolders(own, lock, (), "common")
    overlays = [Overlay(top, _common(job, number), job / f"seen.{number}", _live(job, number))
                for number, top in enumerate(tops)]
    try:
        mount_overlays(overlays, own)
        os.chdir(here)  # that of the overlay
        return PrivateFolders(own, lock, tuple((each.folder, each.common) for each in overlays), "overlay")
    except OSError:
        return _copied(job, own, tops, here, lock)


def remove_abandoned() -> None:
    """Remove the folders of this user's jobs of which no process is running."""
    place = _place()
    if not place.exists() or make_private(place):
        return
    for path in place.glob("*.owner"):
        if _OWNED.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)
    with contextlib.suppress(OSError):
        place.rmdir()  # if that was the last job


def _place() -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"hvkeras-private-{os.geteuid()}"


def _make_place(place: Path) -> None:
    if reason := make_private(place):
        fix = f"chmod 700 {place}, or " if "mode" in reason else ""
        raise MachineError(explain(f"The folder with ranks' private folders must belong to you alone, but {reason}",
                                   f"{fix}set TMPDIR to a folder of yours on every host", folder=str(place)))


# The folder of the job.

def _join(job: Path, tops: Sequence[Path], deadline: float) -> int | None:
    """Lock the folder of the job, with a complete snapshot; the first process creates it."""
    owner, ready = job.with_name(f"{job.name}.owner"), job / "ready"
    while time.monotonic() < deadline:
        _make_place(job.parent)  # again, because the last process of another job removes it
        try:
            lock = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except (FileExistsError, FileNotFoundError):
            with contextlib.suppress(OSError):
                if not _remove_if_abandoned(owner) and ready.exists():
                    lock = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
                    if _shared(lock, owner):
                        return None if why_not_private(job.stat()) else lock
            time.sleep(_POLL)
            continue
        except OSError:
            return None
        if _shared(lock, owner):
            try:
                job.mkdir(0o700)
                for number, top in enumerate(tops):
                    _take_snapshot(top, job, number)
                ready.touch()
            except OSError:
                os.close(lock)
                return None
            return lock
    return None


def _shared(lock: int, owner: Path) -> bool:
    """Acquire the shared lock; return False, and close the file, if it was removed in the meantime."""
    fcntl.flock(lock, fcntl.LOCK_SH)
    with contextlib.suppress(OSError):
        if os.stat(owner, follow_symlinks=False).st_ino == os.fstat(lock).st_ino:
            return True
    os.close(lock)
    return False


def _remove_if_abandoned(owner: Path) -> bool:
    lock = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(lock)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(owner, follow_symlinks=False).st_ino != found.st_ino:  # that of another process by now
            return False
        job = owner.with_suffix("")
        _remove(job)
        for common in owner.parent.glob(f"{job.name}.common.*"):
            common.rmdir()  # not its content, since a common folder may be mounted there; then, a later process does it
        owner.unlink()
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder, in which nothing may be mounted: the removal would include what is mounted."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if any(mount == str(folder) or mount.startswith(f"{folder}/") for mount in mounts):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))

    # Overlays leave a folder that nobody may read, and scripts may have made others read-only.
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


# Snapshots.

def _take_snapshot(top: Path, job: Path, number: int) -> None:
    """Create `seen.N`, and list in `live.N` the folders that it does not contain completely."""
    _common(job, number).mkdir()
    budget, seen = ENTRIES, job / f"seen.{number}"
    left: set[str] = set()
    shutil.copymode(top, _made(seen))
    for folder in _mirrored(top, seen, top, links=True):
        budget -= 0 if folder.is_foreign else folder.entries
        if budget < 0 or folder.is_foreign:
            left.add(folder.path)
            folder.skip()
    while len(left) > _MOUNTS:
        left = {os.path.dirname(each) for each in left}
    (job / f"live.{number}").write_text(json.dumps(sorted(left)))


def _common(job: Path, number: int) -> Path:
    """Return the folder on which a common folder is mounted: outside of the job's folder, which will be removed."""
    return job.with_name(f"{job.name}.common.{number}")


def _live(job: Path, number: int) -> list[str]:
    """Return the folders that a snapshot does not contain completely."""
    return list(json.loads((job / f"live.{number}").read_text()))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class _Folder:
    """Folder whose entries are about to be mirrored."""

    def __init__(self, path: str, entries: list[os.DirEntry[str]]) -> None:
        self.path, self.listed = path, entries
        self.entries = len(entries)

    @property
    def is_foreign(self) -> bool:
        """Whether scripts hardly ever write to it: a hidden folder, or a virtual environment of Python."""
        return (os.path.basename(self.path).startswith(".")
                or any(entry.name == "pyvenv.cfg" for entry in self.listed))

    def skip(self) -> None:
        """Mirror nothing of it."""
        self.listed = []


def _mirrored(source: Path, target: Path, common: Path, links: bool) -> Iterator[_Folder]:
    """Mirror a tree of folders, those near the root first; yield each folder before its entries are mirrored.

    Args:
        common: The tree that symbolic links to files point to.
        links: Whether to create hard links where possible, instead of symbolic ones.
    """
    waiting, copies = deque([""]), 0
    while waiting:
        relative = waiting.popleft()
        try:
            with os.scandir(os.path.join(source, relative)) as found:
                folder = _Folder(relative, list(found))
        except OSError:  # not readable, or removed in the meantime
            continue
        yield folder
        for entry in folder.listed:
            name = os.path.join(relative, entry.name)
            new = os.path.join(target, name)
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(new)
                    shutil.copymode(entry.path, new)
                    waiting.append(name)
                else:
                    copies += _mirror_file(entry.path, new, os.path.join(common, name), links,
                                           copies < _COPIES)


def _mirror_file(path: str, new: str, common: str, links: bool, may_copy: bool = True) -> bool:
    """Mirror a file; return whether it was copied, so that no change of the original has an effect on it."""
    kind = os.stat(path, follow_symlinks=False)
    if stat.S_ISLNK(kind.st_mode):
        os.symlink(os.path.join(os.path.dirname(common), os.readlink(path)), new)
        return False
    if may_copy and stat.S_ISREG(kind.st_mode) and kind.st_size <= _SMALL:
        shutil.copy2(path, new)
        return True
    if links:
        with contextlib.suppress(OSError):  # on another file system, or of another user
            os.link(path, new, follow_symlinks=False)
            return False
    os.symlink(common, new)
    return False


def _copied(job: Path, own: Path, tops: Sequence[Path], here: Path, lock: int) -> PrivateFolders:
    """Copy the snapshot of the current folder, and change to it; other folders remain common."""
    for number, top in enumerate(tops):
        if top not in (here, *here.parents) or _live(job, number):
            continue
        mine = _made(own / f"copy.{number}")
        for _ in _mirrored(job / f"seen.{number}", mine, top, links=False):
            pass
        os.chdir(mine / here.relative_to(top))
        return PrivateFolders(own, lock, ((mine, top),), "copy")
    return PrivateFolders(own, lock, (), "common")
