"""`hvkeras link-horovodrun`: provides a command `horovodrun` where Horovod's own is not installed.

This happens only on request, because two packages that ship a script of the same name overwrite and delete each
other's. The command yields by itself: as soon as Horovod is installed, it starts Horovod's launcher.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hvkeras.cli.run import run
from hvkeras.diagnostics.check_build import horovod_is_installed
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.launcher.run_arguments import Parser

NAME = "horovodrun"
_MARKER = "# Put here by `hvkeras link-horovodrun`; taken away by `hvkeras link-horovodrun --remove`."
_SCRIPT = """#!{python}
{mark}
import sys

from hvkeras.cli.link_horovodrun import horovodrun

if __name__ == "__main__":
    sys.exit(horovodrun())
"""


def link(arguments: Sequence[str]) -> int:
    """Install the command, or remove it.

    Args:
        arguments: What follows `hvkeras link-horovodrun`.

    Returns:
        The exit code, 0.

    Raises:
        UsageError: The file there is not ours, or Horovod's own is installed.
        MachineError: The folder cannot be written.
    """
    parser = Parser(prog="hvkeras link-horovodrun", description=f"Puts a command `{NAME}` into this Python"
                    " environment that does what `hvkeras run` does, until Horovod's own is installed.")
    parser.add_argument("--remove", action="store_true", help="removes it again")
    remove = bool(parser.parse_args(list(arguments)).remove)
    path = Path(sysconfig.get_path("scripts")) / NAME
    try:
        return _remove(path) if remove else _install(path)
    except OSError as error:
        raise MachineError(explain(f"The scripts folder must be writable ({error.strerror})",
                                   "run it as the owner of this Python environment", path=str(path))) from None


def _install(path: Path) -> int:
    if horovod_is_installed():
        raise UsageError(explain("Horovod's own horovodrun is installed here, and is left as it is",
                                 "use it as it is; hvkeras trains under it as well", path=str(path)))
    if not _is_absent_or_ours(path):
        raise UsageError(explain(f"The path of {NAME} must be free", "move the file away first", path=str(path)))
    path.write_text(_SCRIPT.format(python=sys.executable, mark=_MARKER))
    path.chmod(0o755)
    print(f"{path} now does what `hvkeras run` does, until Horovod's own is installed")
    return 0


def _remove(path: Path) -> int:
    if not path.is_symlink() and not path.exists():
        print(f"{path} does not exist")
        return 0
    if not _is_absent_or_ours(path):
        raise UsageError(explain("Only a file that `hvkeras link-horovodrun` made is removed",
                                 "remove it yourself, or by uninstalling the package it came with", path=str(path)))
    path.unlink()
    print(f"{path} is gone")
    return 0


def _is_absent_or_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    return not path.exists() or (path.is_file() and _MARKER.encode() in path.read_bytes())


def horovodrun() -> int:
    """Run the command: Horovod's own launcher where it is installed, else `hvkeras run`."""
    if horovod_is_installed():
        from horovod.runner.launch import run_commandline

        run_commandline()
        return 0
    return run(sys.argv[1:], prog=NAME)
