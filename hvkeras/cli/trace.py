"""The command `hvkeras trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvkeras.diagnostics.trace_files import merge_all
from hvkeras.launcher.run_arguments import Parser


def trace(arguments: Sequence[str]) -> int:
    """Runs `hvkeras trace`: merges the traces that ranks have written, at any time.

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
