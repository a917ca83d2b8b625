"""The command `hvkeras`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

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
  exec              run a script written for Horovod under any launcher (hvkeras exec --as-horovod train.py)
  build-horovod     build Horovod's own engine against the installed TensorFlow
  link-horovodrun   put a command `horovodrun` in place where Horovod's own is not installed

options:
  -h, --help        show this help
  -v, --version     show the version"""


# The functions of the commands, imported when they are needed: they import NumPy, Rich or psutil.
_COMMANDS = {
    "compare": "hvkeras.comparison.command:compare",
    "report": "hvkeras.cli.reports:report",
    "bench": "hvkeras.cli.bench:bench",
    "trace": "hvkeras.cli.reports:trace",
    "doctor": "hvkeras.cli.doctor:doctor",
    "build-horovod": "hvkeras.cli.build_horovod:build_horovod",
    "link-horovodrun": "hvkeras.cli.link_horovodrun:link",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

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
    elif command == "exec":
        return _exec(given[1:])
    elif command in _COMMANDS:
        return guarded(f"hvkeras {command}", lambda: int(resolve_name(_COMMANDS[command])(given[1:])))
    else:
        print(f"{USAGE}\n\nhvkeras: there is no command {command!r}", file=sys.stderr)
        return 2
    return 0


def _exec(arguments: Sequence[str]) -> int:
    from hvkeras.cli.exec import execute, prepare  # noqa: PLC0415 - imports psutil

    prepared = ""

    def prepare_it() -> int:
        nonlocal prepared
        prepared = prepare(arguments)
        return 0

    code = guarded("hvkeras exec", prepare_it)
    execute(prepared)  # outside of `guarded`: the script's errors are its own
    return code
