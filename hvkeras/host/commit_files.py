"""File names of `hvd.elastic` commits, shared by the code that writes them and the code that removes them."""

from __future__ import annotations

from pathlib import Path

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
