"""`hvkeras link-horovodrun`: install a command `horovodrun` where Horovod is not installed.

This happens only on request, because packages that ship scripts of the same name overwrite and delete each other's
scripts. If Horovod is installed later, the command starts Horovod's launcher.
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
        arguments: Arguments of `hvkeras link-horovodrun`.

    Returns:
        Exit code, 0.

    Raises:
        UsageError: Another file has this name, or Horovod's command is installed.
        MachineError: The scripts folder is not writable.
    """
    parser = Parser(prog="hvkeras link-horovodrun", description=f"Install a command `{NAME}` in this Python"
                    " environment that is equivalent to `hvkeras run`, until Horovod is installed.")
    parser.add_argument("--remove", action="store_true", help="remove it again")
    remove = bool(parser.parse_args(list(arguments)).remove)
    path = Path(sysconfig.get_path("scripts")) / NAME
    try:
        return _remove(path) if remove else _install(path)
    except OSError as error:
        raise MachineError(explain(f"The scripts folder must be writable ({error.strerror})",
                                   "run it as the owner of this Python environment", path=str(path))) from None


def _install(path: Path) -> int:
    if horovod_is_installed():
        raise UsageError(explain("Horovod's own horovodrun is installed here, and is not replaced",
                                 "use it; hvkeras trains under it as well", path=str(path)))
    if not _is_absent_or_ours(path):
        raise UsageError(explain(f"The path of {NAME} must be free", "move the file away first", path=str(path)))
    path.write_text(_SCRIPT.format(python=sys.executable, mark=_MARKER))
    path.chmod(0o755)
    print(f"{path} is now equivalent to `hvkeras run`, until Horovod is installed")
    return 0


def _remove(path: Path) -> int:
    if not path.is_symlink() and not path.exists():
        print(f"{path} does not exist")
        return 0
    if not _is_absent_or_ours(path):
        raise UsageError(explain("Only a file from `hvkeras link-horovodrun` can be removed",
                                 "remove it yourself, or uninstall its package", path=str(path)))
    path.unlink()
    print(f"{path} is removed")
    return 0


def _is_absent_or_ours(path: Path) -> bool:
    if path.is_symlink():
        return False
    return not path.exists() or (path.is_file() and _MARKER.encode() in path.read_bytes())


def horovodrun() -> int:
    """Run Horovod's launcher if it is installed, else `hvkeras run`."""
    if horovod_is_installed():
        from horovod.runner.launch import run_commandline

        run_commandline()
        return 0
    return run(sys.argv[1:], prog=NAME)
