"""What a rank hands over to its own program when that restarts in the same process: its commits, in memory.

Backends that cannot start again in a process, such as `tfdist`, need this. The commits are in a file that has no name
and no disk (memfd_create), which only this process can open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvkeras.elastic.encoding import decode, encode

Commits = dict[int, dict[str, Any]]  # of each elastic function, by its index


def written(commits: Mapping[int, Mapping[str, Any]]) -> int:
    """Writes commits to memory.

    Args:
        commits: The last commit of each elastic function.

    Returns:
        The descriptor of the file.
    """
    descriptor = os.memfd_create("hvkeras-commits", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for piece in encode({number: dict(commit) for number, commit in commits.items()}):
            file.write(piece)
    return descriptor


def read(descriptor: int) -> Commits:
    """Reads what `written` has written; the file stays open."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        found: Commits = decode(file.read())
    return found
