"""Files that Keras's own callbacks would write on several ranks at the same time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvkeras.host.console import format_ranks

# By name: the attribute with the path, and what writes on one rank only.
_WRITERS = {
    "ModelCheckpoint": ("filepath", "use hvd.callbacks.ModelCheckpoint"),
    "BackupAndRestore": ("backup_dir", "use hvd.callbacks.BackupAndRestore"),
    "CSVLogger": ("filename", "pass it as hvd.rank0_callbacks([CSVLogger(...)])"),
}

File = tuple[str, str]  # the name of a callback, and the path that it writes to


def files_of(callbacks: Iterable[Any]) -> list[File]:
    """Return the paths that Keras's own callbacks write to on this rank. Classes derived from them may do otherwise."""
    found = []
    for callback in callbacks:
        name, module = type(callback).__name__, type(callback).__module__
        if name in _WRITERS and module.partition(".")[0] in ("keras", "tf_keras"):
            path = os.fspath(getattr(callback, _WRITERS[name][0]))
            found.append((name, path if "://" in path else os.path.abspath(path)))
    return found


@functools.cache
def note_save(path: Any, say: Callable[[str], None]) -> None:
    """Say once for a path that rank 1 saves a model to it, unless its name contains the number of the rank."""
    if "1" not in os.path.basename(os.fspath(path)):
        say(f"rank 1 saves {os.fspath(path)}: if all ranks do, they write one file at the same time. HINT: if"
            " hvd.rank() == 0: model.save(...)")


class SharedFiles:
    """Paths that several ranks write to, each of which is reported once."""

    def __init__(self) -> None:
        self._reported: set[File] = set()

    def warnings(self, ranks: Sequence[int], everyone: Sequence[Sequence[File]]) -> list[str]:
        """Return a message for each path that several ranks write to, unless it was returned before.

        Args:
            everyone: Result of `files_of` on each of the ranks.
        """
        found = []
        for file in dict.fromkeys(file for files in everyone for file in files):
            writers = [rank for rank, files in zip(ranks, everyone, strict=True) if file in files]
            if len(writers) > 1 and file not in self._reported:
                self._reported.add(file)
                name, path = file
                found.append(f"{format_ranks(writers)} write to the same path with Keras's {name}, which may damage"
                             f" it: {path}. HINT: {_WRITERS[name][1]}, which writes on one rank only")
        return found
