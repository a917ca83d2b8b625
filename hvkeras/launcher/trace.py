"""The command `hvkeras trace`, and what `hvkeras run` does with traces once the job is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvkeras.errors import HvkerasError, UsageError, explain
from hvkeras.launcher.arguments import Parser
from hvkeras.settings import Settings
from hvkeras.trace import merge, merge_all, rank_files


def trace(arguments: Sequence[str]) -> int:
    """Runs `hvkeras trace`: merges what ranks have written, at any time.

    Args:
        arguments: What follows it on the command line.

    Returns:
        The exit code.

    Raises:
        MachineError: A file cannot be written.
        UsageError: There is nothing to merge.
    """
    parser = Parser(prog="hvkeras trace", allow_abbrev=False, usage="hvkeras trace [FOLDER | FILE]",
                    description="Merges the ranks' traces of a folder (trace.rank.0.json, trace.rank.1.json, ...) into"
                    " one (trace.json), also while the job runs or after a crash. Traces of other hosts are to be"
                    " copied there first.")
    parser.add_argument("place", nargs="?", default=".", type=Path, metavar="FOLDER | FILE", help="Where they are, or"
                        " the merged file's name; the current folder by default.")
    for merged in merge_all(parser.parse_args(list(arguments)).place):
        print(f"hvkeras trace: {merged.sentence()}")
    return 0


def trace_of(settings: Settings, folder: str) -> Path | None:
    """The merged file of a job that is to be traced; None if it is not.

    Args:
        settings: Those of the job.
        folder: Its working folder.

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
    """Removes what ranks of an earlier job have left, before a job that traces into the same file.

    Args:
        path: The merged file, if there is to be one.
    """
    for file in rank_files(path).values() if path is not None else ():
        file.unlink(missing_ok=True)


def merged_after(path: Path) -> str:
    """Merges what the ranks of a job have left; returns what there is to say of it.

    Args:
        path: The merged file.
    """
    try:
        merged = merge(path)
    except HvkerasError as error:  # the job's own exit code counts
        return str(error)
    return merged.sentence() if merged is not None else f"no rank left a trace in {path.parent}"
