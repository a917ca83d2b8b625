"""Start of the mode in which all ranks compute the batches of one process."""

from __future__ import annotations

from hvkeras.global_batch import files


def start() -> None:
    """Start the mode for the rest of this process; nothing changes in a job of one rank."""
    files.install()
