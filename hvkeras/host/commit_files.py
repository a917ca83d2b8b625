"""The names of the files that hold commits of `hvd.elastic`, for who writes them and for who removes them."""

from __future__ import annotations

from pathlib import Path

_PREFIX = "commit-"


def commit_path(folder: Path, number: int) -> Path:
    """Where the last commit is of a state that is the script's `number`-th."""
    return folder / f"{_PREFIX}{number}"


def remove_commits(folder: Path) -> None:
    """Removes all commits of a job that has come to its end.

    Args:
        folder: Where they are; it may be missing.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)
