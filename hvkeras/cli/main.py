"""The command `hvkeras`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvkeras import __version__
from hvkeras.cli.errors import guarded, quiet_after_readers
from hvkeras.host.console import open_closed_streams

USAGE = """usage: hvkeras COMMAND ...

commands:
  run               start a training script on several processes and hosts (hvkeras run --help)
  compare           train one script on each backend, and compare speed and results
  report            rewrite the report on a run from what its ranks have recorded
  bench             measure backends against each other, in one job, with every result verified
  trace             merge the ranks' traces of a job into one (hvkeras run --trace-steps records them)
  doctor            check whether training will work on this machine or these hosts, and how to fix it
  link-horovodrun   put a command `horovodrun` in place where Horovod's own is not installed

options:
  -h, --help        show this help
  -v, --version     show the version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The command line after `hvkeras`; this process's by default.

    Returns:
        The exit code.
    """
    open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    return quiet_after_readers(lambda: _command(given))


def _command(given: Sequence[str]) -> int:
    command = given[0] if given else "--help"
    if command in ("-v", "--version"):
        print(f"hvkeras {__version__}")
    elif command in ("-h", "--help"):
        print(USAGE)
    elif command == "run":
        from hvkeras.cli.run import run  # noqa: PLC0415 - imports psutil

        return run(given[1:])
    elif command == "compare":
        from hvkeras.comparison.command import compare  # noqa: PLC0415 - imports NumPy and Rich

        return guarded("hvkeras compare", lambda: compare(given[1:]))
    elif command == "report":
        from hvkeras.cli.report import report  # noqa: PLC0415 - imports NumPy

        return guarded("hvkeras report", lambda: report(given[1:]))
    elif command == "bench":
        from hvkeras.cli.bench import bench  # noqa: PLC0415 - imports NumPy and Rich

        return guarded("hvkeras bench", lambda: bench(given[1:]))
    elif command == "trace":
        from hvkeras.cli.trace import trace  # noqa: PLC0415 - imports psutil

        return guarded("hvkeras trace", lambda: trace(given[1:]))
    elif command == "doctor":
        from hvkeras.doctor.command import doctor  # noqa: PLC0415 - imports NumPy and Rich

        return guarded("hvkeras doctor", lambda: doctor(given[1:]))
    elif command == "link-horovodrun":
        from hvkeras.cli.link_horovodrun import link  # noqa: PLC0415 - imports psutil

        return guarded("hvkeras link-horovodrun", lambda: link(given[1:]))
    else:
        print(f"{USAGE}\n\nhvkeras: there is no command {command!r}", file=sys.stderr)
        return 2
    return 0
