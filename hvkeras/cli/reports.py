"""Commands `hvkeras report` and `hvkeras trace`: what the files of a job's ranks show, at any time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvkeras.diagnostics.run_report import write_report
from hvkeras.diagnostics.trace_files import merge_all
from hvkeras.errors import MachineError, explain
from hvkeras.launcher.run_arguments import DEFAULT, Parser


def report(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: What follows `hvkeras report`.

    Returns:
        The exit code.

    Raises:
        MachineError: There are no records, or the folder cannot be written to.
        UsageError: The command line cannot be read.
    """
    made = Parser(prog="hvkeras report", description="Writes report.html and report.json on a run from the records of"
                  " its ranks, also after a crash or while it runs.", allow_abbrev=False)
    made.add_argument("folder", nargs="?", default=DEFAULT, metavar="FOLDER", help="What hvkeras run --report or"
                      f" HVKERAS_REPORT named ({DEFAULT}).")
    folder = Path(made.parse_args(list(arguments)).folder)
    try:
        print(write_report(folder))
    except OSError as error:
        raise MachineError(explain(f"The report's folder must be writable ({error.strerror})", "copy the records to"
                                   " another one", folder=folder)) from None
    return 0


def trace(arguments: Sequence[str]) -> int:
    """Run `hvkeras trace`: merges the traces that ranks have written, at any time.

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
