"""Files that Keras writes, under `--data-parallel`: written once, by rank 0, and then visible to all ranks.

All ranks call each function that writes. The others wait for rank 0, and get its exception if it raises one. What rank
0 has written then appears at the path that each rank has given, also if this is in a private folder, or if the paths
differ.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvkeras.collectives.broadcasts import allgather_object, broadcast_object
from hvkeras.compat import patches
from hvkeras.global_batch import rank_process
from hvkeras.host.console import say
from hvkeras.host.files import locked
from hvkeras.host.private_folders import PrivateFolders
from hvkeras.job.session import current_session, is_initialized

_PATHS = ("filepath", "to_file", "path")  # names of the parameters for the file
_OF_CALLBACKS = ("filepath", "backup_dir", "filename")  # their attributes for it
_VISIBLE_AFTER, _POLL = 10.0, 0.1  # seconds: network file systems may know for some time that there is no file
_CLOCK = 2 * 10**9  # nanoseconds by which the times of files may be too early
_DECISIONS = ("best", "_last_batch_seen")  # what a callback learns when it saves


def install() -> None:
    """Make Keras write and download each file once."""
    functions = _Functions(current_session().topology.rank)
    patches.install(patches.FILES, patches.FilesBehaviour(
        functions.write, functions.write_alone, functions.read, functions.callbacks, functions.download,
        functions.listed))


class _Functions(threading.local):
    """The functions around those of Keras. Within another one of them, they only call Keras's.

    Args:
        rank: Rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._process = rank, os.getpid()
        self._written: list[str] | None = None  # by the function that this thread is in
        self._shares_files = True  # with rank 0, as far as is known

    def _apply(self) -> bool:
        return self._written is None and os.getpid() == self._process and is_initialized()

    def write(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that writes on rank 0, and make its files visible on all ranks."""
        if self._apply() and _path_of(original, args, kwargs):
            return self._write(original, args, kwargs)
        if self._written is not None:
            self._written.append(_path_of(original, args, kwargs))
        return original(*args, **kwargs)

    def write_alone(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that writes on rank 0."""
        return original(*args, **kwargs) if self._rank == 0 or not self._apply() else None

    def read(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a callback with the files that rank 0 sees."""
        if self._apply():
            self._write(lambda _: None, args[:1], {}, f"the files of {type(args[0]).__name__}")
        return original(*args, **kwargs)

    def callbacks(self, original: Callable[..., None], callback_list: Any, callbacks: Any = None, *args: Any,
                  **kwargs: Any) -> None:
        """Construct a `CallbackList`."""
        listed = _without_writers(callbacks) if self._rank and callbacks and self._apply() else callbacks
        original(callback_list, listed, *args, **kwargs)

    def download(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `get_file`."""
        return _download(original, args, kwargs) if self._apply() else original(*args, **kwargs)

    def listed(self, original: Callable[..., list[str]], path: Any) -> list[str]:
        """List a folder."""
        return rank_process.in_common_order(original(path), path, original)

    def _write(self, original: Callable[..., Any], args: Any, kwargs: Any, name: str = "") -> Any:
        name = name or getattr(original, "__qualname__", "a save")
        own, callback = _path_of(original, args, kwargs), args[0] if args else None
        result, error = None, None
        files: dict[str, bool] = {}
        decisions: dict[str, Any] = {}
        if self._rank == 0:
            before, began = _beside(own), time.time_ns() - _CLOCK
            self._written = [own]
            try:
                result = original(*args, **kwargs)
            except Exception as raised:  # noqa: BLE001 - raised on all ranks below
                error = raised
            finally:
                written, self._written = self._written, None
            new = [path for target in written for path, changed in _beside(target).items() if changed >= began]
            removed = [path for path in before if not os.path.lexists(path)]
            files = {path: os.path.lexists(path) for path in (*written, *new, *removed) if path}
            decisions = {each: vars(callback)[each] for each in _DECISIONS if each in getattr(callback, "__dict__", ())}
        theirs, files, reason, decisions = broadcast_object((own, files, _portable(error), decisions), name=name)
        if error is not None:
            raise error
        if self._rank:
            for path, exists in files.items():
                if exists and not self._sees(_common(path)):
                    continue
                _show(path, theirs, own)
            for attribute, value in decisions.items():
                setattr(callback, attribute, value)
        if reason is not None:
            raise pickle.loads(reason)
        return result


    def _sees(self, path: Path) -> bool:
        """Wait until this host sees a file of rank 0's host; return False if they do not seem to share the folder."""
        deadline = time.monotonic() + _VISIBLE_AFTER
        while not os.path.lexists(path):
            if not self._shares_files or time.monotonic() >= deadline:
                if self._shares_files and current_session().topology.local_rank == 0:
                    say(f"the files that rank 0 writes are not visible on {current_session().topology.host}, which does"
                        f" not seem to share the folder: {path}")
                self._shares_files = False
                return False
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # network file systems look again
            time.sleep(_POLL)
        return True


def _path_of(original: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Return the absolute path that a function writes to; "" if it writes to an object in memory."""
    found: Any = ""
    for name in _OF_CALLBACKS:
        found = found or (getattr(args[0], name, "") if args else "")
    with contextlib.suppress(TypeError, ValueError):
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        found = next((bound.arguments[name] for name in _PATHS if name in bound.arguments), found)
    try:
        path = str(os.fspath(found))
    except TypeError:
        return ""
    return os.path.abspath(path) if path and "://" not in path else path


def _beside(path: str) -> dict[str, int]:
    """Return the files of which the name begins like that of a path, such as its shards, and when they changed."""
    found = {}
    folder, name = os.path.split(path)
    for each in glob.glob(os.path.join(glob.escape(folder), f"{glob.escape(name.partition('.')[0])}*")) if name else ():
        with contextlib.suppress(OSError):
            found[each] = os.stat(each).st_mtime_ns
    return found


def _portable(error: Exception | None) -> bytes | None:
    """Return an exception for other ranks."""
    if error is None:
        return None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _show(path: str, theirs: str, own: str) -> None:
    """Make a file of rank 0 visible.

    Args:
        path: The file.
        theirs: The path that the function was given on rank 0.
        own: The path that it was given on this rank.
    """
    target = own if path == theirs else os.path.join(
        os.path.dirname(own), os.path.relpath(path, os.path.dirname(theirs))) if own else path
    common = _common(path)
    if _common(target) != Path(target):
        PrivateFolders.show(target, common)
    elif target != path and common.exists() and not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(common, target)


def _without_writers(callbacks: Any) -> list[Any]:
    """Return the callbacks that a rank other than 0 runs: without Keras's TensorBoard."""
    import keras

    return [each for each in keras.tree.flatten(callbacks) if not isinstance(each, keras.callbacks.TensorBoard)
            or type(each).__module__.startswith("hvkeras.")]


def _download(original: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Download, and extract, a file on the first rank of each host; the others wait, and get the same file."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    chosen, topology = bound.arguments, current_session().topology
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    own = os.path.join(os.path.expanduser(chosen["cache_dir"] or home), chosen["cache_subdir"])
    common = _common(own)
    found, error = "", None
    if topology.local_rank == 0:
        if common != Path(os.path.abspath(own)):
            chosen["cache_subdir"] = str(common)
        try:
            with locked(common / f".{chosen['fname'] or os.path.basename(str(chosen['origin']))}.lock"):
                found = os.path.relpath(original(*bound.args, **bound.kwargs), common)
        except Exception as raised:  # noqa: BLE001 - raised on all ranks below
            error = raised
    of_ranks = allgather_object((found, _portable(error)), name="get_file")
    if error is not None:
        raise error
    for _, reason in of_ranks:
        if reason is not None:
            raise pickle.loads(reason)
    numbers = topology.host_numbers
    found, _ = of_ranks[numbers.index(numbers[topology.rank])]
    if found.startswith(os.pardir):  # Keras could not write to the folder, and has chosen another one
        return os.path.abspath(os.path.join(common, found))
    if common != Path(os.path.abspath(own)):
        PrivateFolders.show(os.path.join(own, found), common / found)
    return os.path.join(own, found)


def _common(path: str) -> Path:
    """Return the path at which all ranks see a file or folder."""
    folders = rank_process.folders()
    return Path(os.path.abspath(path)) if folders is None else folders.common(path)
