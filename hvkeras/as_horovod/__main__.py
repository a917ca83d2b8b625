"""`python -m hvkeras.as_horovod script.py ...`: runs a script written for Horovod, under any launcher."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

from hvkeras import as_horovod
from hvkeras.errors import UsageError, explain
from hvkeras.launch_environments import detect_launch
from hvkeras.launch_environments.horovod_variables import launch_variables

USAGE = "usage: python -m hvkeras.as_horovod [-m MODULE | SCRIPT.py] ..."


def main(arguments: list[str]) -> None:
    """Runs the script or module as Python would.

    Args:
        arguments: The command-line arguments.

    Raises:
        UsageError: The script does not exist.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    os.environ.update(as_horovod.environment(os.environ))
    with contextlib.suppress(UsageError):  # init() reports the error
        os.environ.update(launch_variables(detect_launch()))
    as_horovod.install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        raise UsageError(explain("The script must be a file", USAGE, script=str(script)))
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"hvkeras.as_horovod: {error}")
