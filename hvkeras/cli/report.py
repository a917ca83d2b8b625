"""`hvkeras report`: writes the report on a run from the records of its ranks, at any time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvkeras.diagnostics.run_report import write_report
from hvkeras.errors import MachineError, explain
from hvkeras.launcher.run_arguments import DEFAULT, Parser


def report(arguments: Sequence[str]) -> int:
    """Runs the command.

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
