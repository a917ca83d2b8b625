"""How `hvkeras run` handles the ranks' traces before and after a job."""

from __future__ import annotations

from pathlib import Path

from hvkeras.diagnostics.trace_files import merge, rank_files
from hvkeras.errors import HvkerasError, UsageError, explain
from hvkeras.settings import Settings


def trace_of(settings: Settings, folder: str) -> Path | None:
    """Returns the merged trace file of a job that is to be traced; None if it is not.

    Args:
        settings: The job's settings.
        folder: The job's working folder.

    Raises:
        UsageError: The file's folder does not exist.
    """
    if settings.trace_steps is None:
        return None
    path = Path(folder, settings.trace_file)
    if not path.parent.is_dir():
        raise UsageError(explain("The trace's folder must exist", "make it", trace_file=str(path)))
    return path


def forget_traces(path: Path | None) -> None:
    """Removes the rank traces of an earlier job, before a job that traces into the same file.

    Args:
        path: The merged file; None if the job is not traced.
    """
    for file in rank_files(path).values() if path is not None else ():
        file.unlink(missing_ok=True)


def merged_after(path: Path) -> str:
    """Merges the traces that the ranks of a job have left; returns a message about the result.

    Args:
        path: The merged file.
    """
    try:
        merged = merge(path)
    except HvkerasError as error:  # the job's own exit code takes precedence
        return str(error)
    return merged.sentence() if merged is not None else f"no rank left a trace in {path.parent}"
