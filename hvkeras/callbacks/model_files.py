"""Atomic file writes: readers, and a restart after a crash, always get a complete file."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvkeras.callbacks.base import spanning_strategy
from hvkeras.errors import MachineError, explain
from hvkeras.host.files import replace_durably, room_left, why_full

_PARTIAL = ".partial-"
_SINGLE_FILES = (".keras", ".h5")


@contextlib.contextmanager
def replacing(path: Path, size: int | None = None, former: Path | None = None) -> Iterator[Path]:
    """Yield a path to write to, for a file that replaces `path` when it is complete and on disk.

    The temporary path is in a separate folder beside `path`, since Keras may write further files next to its target.

    Args:
        path: The file to replace.
        size: The minimum size of the new file in bytes, if known.
        former: The new path of the previous file, if it is kept.

    Raises:
        MachineError: There is not enough free space. The previous file stays intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(_PARTIAL + path.name)
    _remove(folder)
    try:
        folder.mkdir()
        yield folder / path.name
        replace_durably(folder / path.name, path, former)
    except Exception as error:
        reason = why_full(error)
        if not reason:
            raise
        written = (folder / path.name).stat().st_size if (folder / path.name).exists() else 0
        _remove(folder)
        raise MachineError(explain(
            f"A file must fit on its disk ({reason})", "free space, or choose another folder"
            + ("; the previous file is still intact" if path.exists() else ""), path=str(path),
            size=written if size is None else max(size, written), room_left=room_left(path))) from error
    finally:
        _remove(folder)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of a killed process for `path`, whose name may have wildcards."""
    for leftover in path.parent.glob(_PARTIAL + path.name):
        _remove(leftover)


def local_reads(model: Any) -> Any:
    """Return a context in which variables that are summed or averaged on read return their local value.

    In it, saving a model starts no collective.
    """
    strategy = spanning_strategy(model)
    return contextlib.nullcontext() if strategy is None else tf.distribute.ReplicaContext(
        strategy, replica_id_in_sync_group=0)


@contextlib.contextmanager
def atomic_files(model: Any) -> Iterator[None]:
    """Enter a scope in which `model.save` and `model.save_weights` replace files atomically."""
    names = ("save", "save_weights")
    before = {name: model.__dict__[name] for name in names if name in model.__dict__}
    model.__dict__.update({name: _atomic(getattr(model, name)) for name in names})
    try:
        with local_reads(model):
            yield
    finally:
        for name in names:
            del model.__dict__[name]
        model.__dict__.update(before)


def _atomic(write: Callable[..., Any]) -> Callable[..., Any]:
    def save(filepath: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(filepath)
        if "://" in str(filepath) or path.suffix not in _SINGLE_FILES:
            write(filepath, *args, **kwargs)
            return
        with replacing(path) as partial:
            write(str(partial), *args, **kwargs)

    return save


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
