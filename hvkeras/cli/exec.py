"""`hvkeras exec`: run a script in this process, under any launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hvkeras.control.launch_environments import detect_launch
from hvkeras.control.launch_environments.horovod_variables import launch_variables
from hvkeras.errors import UsageError, explain
from hvkeras.global_batch import rank_process
from hvkeras.horovod import as_horovod

FLAG = "--as-horovod"
USAGE = f"""usage: hvkeras exec {FLAG} [-m MODULE | SCRIPT.py] ...
       hvkeras exec {rank_process.FLAG} [{rank_process.WITHOUT_FOLDERS}] [-m MODULE | SCRIPT.py | -- COMMAND] ...

Run a script on a rank that any launcher has started:
  {FLAG}           written for Horovod: `import horovod` imports hvkeras
  {rank_process.FLAG}        written for one process: Keras trains on all ranks, with the result of one process
  {rank_process.WITHOUT_FOLDERS}   all ranks write to the same working folder"""


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
        print(USAGE)
        return ""
    if rank_process.FLAG in given[:2]:
        _become_rank(given)
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


def _become_rank(given: Sequence[str]) -> NoReturn:
    """Replace this process by a script or command for one process."""
    flags = list(itertools.takewhile(lambda word: word.startswith("--") and word != "--", given))
    command, example = list(given[len(flags):]), f"hvkeras exec {rank_process.FLAG} train.py"
    if FLAG in flags:
        raise UsageError(explain("A script must be written either for one process or for Horovod",
                                 f"leave out {rank_process.FLAG} or {FLAG}"))
    unknown = [flag for flag in flags if flag not in (rank_process.FLAG, rank_process.WITHOUT_FOLDERS)]
    if unknown:
        raise UsageError(explain("Flags before the script must be those of hvkeras exec", example, flag=unknown[0]))
    if not command[command[:1] in (["-m"], ["--"]):]:
        raise UsageError(explain(f"A script, a module or a command must follow {rank_process.FLAG}", example,
                                 arguments=" ".join(given)))
    if command[0] == "--":
        command = command[1:]
    else:
        if command[0] != "-m" and not Path(command[0]).is_file():
            raise UsageError(explain("The script must be a file", example, script=command[0]))
        command = [sys.executable, *command]
    rank_process.become(command, rank_process.WITHOUT_FOLDERS not in flags)


def execute(prepared: str) -> None:
    """Run the script or module that `prepare` has returned."""
    if prepared.startswith("-m "):
        runpy.run_module(prepared.removeprefix("-m "), run_name="__main__", alter_sys=True)
    elif prepared:
        runpy.run_path(prepared, run_name="__main__")
