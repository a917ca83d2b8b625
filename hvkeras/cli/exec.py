"""`hvkeras exec`: run a script in this process, under any launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvkeras.control.launch_environments import detect_launch
from hvkeras.control.launch_environments.horovod_variables import launch_variables
from hvkeras.errors import UsageError, explain
from hvkeras.global_batch import rank_process
from hvkeras.horovod import as_horovod

FLAG = "--as-horovod"
USAGE = f"""usage: hvkeras exec {FLAG} [-m MODULE | SCRIPT.py | -- COMMAND] ...
       hvkeras exec {rank_process.FLAG} [{rank_process.WITHOUT_FOLDERS}] [-m MODULE | SCRIPT.py | -- COMMAND] ...

Run a script on a rank that any launcher has started:
  {FLAG}           written for Horovod: `import horovod` imports hvkeras
  {rank_process.FLAG}        written for one process: Keras trains on all ranks, with the result of one process
  {rank_process.WITHOUT_FOLDERS}   all ranks write to the same working folder"""


def prepare(arguments: Sequence[str]) -> str:
    """Alias `horovod` to hvkeras, and set `sys.argv` and `sys.path` as Python does for a script.

    With `--data-parallel`, or with a command after `--`, this process becomes the command instead.

    Args:
        arguments: Arguments of `hvkeras exec`.

    Returns:
        The script, or `-m` and the module; "" after a request for help.

    Raises:
        UsageError: The command line is invalid, or the script does not exist.
        SystemExit: The command cannot be started.
    """
    if "--help" in arguments[:1] or "-h" in arguments[:1]:
        print(USAGE)
        return ""
    flags = list(itertools.takewhile(lambda word: word.startswith("--") and word != "--", arguments))
    command = list(arguments[len(flags):])
    _require_valid(flags, command, arguments)
    if rank_process.FLAG in flags:
        command = command[1:] if command[0] == "--" else [sys.executable, *command]
        _become(command, rank_process.environment_of_rank(command, rank_process.WITHOUT_FOLDERS not in flags))
    os.environ.update(as_horovod.environment(os.environ))
    with contextlib.suppress(UsageError):  # init() reports the error
        os.environ.update(launch_variables(detect_launch()))
    if command[0] == "--":
        _become(command[1:], os.environ)
    as_horovod.install()
    is_module = command[0] == "-m"
    script = command[is_module]
    sys.argv = command[is_module:]
    sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    return "-m " * is_module + script


def _require_valid(flags: Sequence[str], command: Sequence[str], given: Sequence[str]) -> None:
    chosen = [flag for flag in (FLAG, rank_process.FLAG) if flag in flags]
    example = f"hvkeras exec {chosen[0] if chosen else FLAG} train.py"
    if len(chosen) > 1:
        raise UsageError(explain("A script must be written either for one process or for Horovod",
                                 f"leave out {rank_process.FLAG} or {FLAG}"))
    known = {FLAG: (FLAG,), rank_process.FLAG: (rank_process.FLAG, rank_process.WITHOUT_FOLDERS)}
    unknown = [flag for flag in flags if chosen and flag not in known[chosen[0]]]
    if unknown:
        raise UsageError(explain("Flags before the script must be those of hvkeras exec", example, flag=unknown[0]))
    if not chosen:
        raise UsageError(explain(f"{FLAG} or {rank_process.FLAG} must come before the script", example,
                                 arguments=" ".join(given) or None))
    if not command[command[:1] in (["-m"], ["--"]):]:
        raise UsageError(explain(f"A script, a module or a command must follow {chosen[0]}", example,
                                 arguments=" ".join(given)))
    if command[0] not in ("-m", "--") and not Path(command[0]).is_file():
        raise UsageError(explain("The script must be a file", example, script=command[0]))


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command."""
    try:
        os.execvpe(command[0], list(command), environ)
    except OSError as error:
        text = explain(f"The command must start on every host ({error.strerror})",
                       "check its spelling, the PATH and the current folder there", command=command[0])
        print(f"hvkeras exec: {text}", file=sys.stderr)
        sys.exit(126 if isinstance(error, PermissionError) else 127)  # as shells do


def execute(prepared: str) -> None:
    """Run the script or module that `prepare` has returned."""
    if prepared.startswith("-m "):
        runpy.run_module(prepared.removeprefix("-m "), run_name="__main__", alter_sys=True)
    elif prepared:
        runpy.run_path(prepared, run_name="__main__")
