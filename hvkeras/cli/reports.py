"""Commands `hvkeras report` and `hvkeras trace`: merge the files of a job's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvkeras.diagnostics.run_report import write_report
from hvkeras.diagnostics.trace_files import merge_all
from hvkeras.errors import MachineError, explain
from hvkeras.launcher.run_arguments import DEFAULT, Parser


def report(arguments: Sequence[str]) -> int:
    """Run `hvkeras report`.

    Args:
        arguments: Arguments of the command.

    Returns:
        Exit code.

    Raises:
        MachineError: There are no records, or the folder cannot be written to.
        UsageError: The command line is invalid.
    """
    made = Parser(prog="hvkeras report", description="Write report.html and report.json of a run from the records of"
                  " its ranks, also after a crash or during the run.", allow_abbrev=False)
    made.add_argument("folder", nargs="?", default=DEFAULT, metavar="FOLDER", help="Folder of hvkeras run --report or"
                      f" HVKERAS_REPORT ({DEFAULT}).")
    folder = Path(made.parse_args(list(arguments)).folder)
    try:
        print(write_report(folder))
    except OSError as error:
        raise MachineError(explain(f"The report's folder must be writable ({error.strerror})", "copy the records to"
                                   " another one", folder=folder)) from None
    return 0


def trace(arguments: Sequence[str]) -> int:
    """Run `hvkeras trace`: merge the traces of ranks.

    Args:
        arguments: Arguments of the command.

    Returns:
        Exit code.

    Raises:
        MachineError: A file cannot be written.
        UsageError: There is nothing to merge.
    """
    parser = Parser(prog="hvkeras trace", allow_abbrev=False, usage="hvkeras trace [FOLDER | FILE]",
                    description="Merge the ranks' traces in a folder (trace.rank.0.json, trace.rank.1.json, ...) into"
                    " one (trace.json), also during the job or after a crash. Traces of other hosts must be"
                    " copied there first.")
    parser.add_argument("path", nargs="?", default=".", type=Path, metavar="FOLDER | FILE", help="Folder of the"
                        " traces, or name of the merged file; the current folder by default.")
    for merged in merge_all(parser.parse_args(list(arguments)).path):
        print(f"hvkeras trace: {merged.sentence()}")
    return 0
