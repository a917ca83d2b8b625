"""The command `hvkeras`."""

from __future__ import annotations

import difflib
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
  report            rewrite the report of a run from the records of its ranks
  bench             benchmark backends in interleaved blocks, with every result verified
  trace             merge the traces of a job's ranks into one (hvkeras run --trace-steps records them)
  doctor            check whether training will work on this machine or on hosts, and print fixes
  exec              run a script written for Horovod, or for one process, under any launcher (hvkeras exec --help)
  build-horovod     build Horovod against the installed TensorFlow
  link-horovodrun   install a command `horovodrun` where Horovod is not installed

options:
  -h, --help        show this help
  -v, --version     show the version"""


# Functions of the commands, imported on demand, since they import NumPy, Rich or psutil.
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
        arguments: The command line after `hvkeras`; that of this process by default.

    Returns:
        Exit code.
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
        near = difflib.get_close_matches(command, ["run", "exec", *_COMMANDS], n=1)
        hint = f"HINT: did you mean {near[0]}" if near else "HINT: hvkeras --help lists the commands"
        print(f"hvkeras: there is no command {command!r}\n{hint}", file=sys.stderr)
        return 2
    return 0


def _exec(arguments: Sequence[str]) -> int:
    from hvkeras.cli.exec import execute, prepare  # noqa: PLC0415 - imports psutil

    prepared = ""

    def prepare_script() -> int:
        nonlocal prepared
        prepared = prepare(arguments)
        return 0

    code = guarded("hvkeras exec", prepare_script)
    execute(prepared)  # outside of `guarded`, which is not for errors of the script
    return code
