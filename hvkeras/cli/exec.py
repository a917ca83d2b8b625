"""`hvkeras exec`: run a script in this process, under any launcher."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hvkeras.control.launch_environments import detect_launch
from hvkeras.control.launch_environments.horovod_variables import launch_variables
from hvkeras.errors import UsageError, explain
from hvkeras.horovod import as_horovod

FLAG = "--as-horovod"
USAGE = f"usage: hvkeras exec {FLAG} [-m MODULE | SCRIPT.py] ..."


def prepare(arguments: Sequence[str]) -> str:
    """Alias `horovod` to hvkeras, and set `sys.argv` and `sys.path` as Python does for a script.

    Args:
        arguments: Arguments of `hvkeras exec`.

    Returns:
        The script, or `-m` and the module; "" after a request for help.

    Raises:
        UsageError: The command line is invalid, or the script does not exist.
    """
    given = list(arguments)
    if "--help" in given[:1] or "-h" in given[:1]:
        print(f"{USAGE}\n\nRun a script written for Horovod, under any launcher: `import horovod` imports hvkeras.")
        return ""
    command = given[1:] if given[:1] == [FLAG] else []
    is_module = command[:1] == ["-m"]
    if not command[is_module:]:
        raise UsageError(explain(f"{FLAG} and a script must follow the command", f"hvkeras exec {FLAG} train.py",
                                 arguments=" ".join(given) or None))
    script = command[is_module]
    if not is_module and not Path(script).is_file():
        raise UsageError(explain("The script must be a file", f"hvkeras exec {FLAG} train.py", script=script))
    os.environ.update(as_horovod.environment(os.environ))
    with contextlib.suppress(UsageError):  # init() reports the error
        os.environ.update(launch_variables(detect_launch()))
    as_horovod.install()
    sys.argv = command[is_module:]
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    return "-m " * is_module + script


def execute(prepared: str) -> None:
    """Run the script or module that `prepare` has returned."""
    if prepared.startswith("-m "):
        runpy.run_module(prepared.removeprefix("-m "), run_name="__main__", alter_sys=True)
    elif prepared:
        runpy.run_path(prepared, run_name="__main__")
