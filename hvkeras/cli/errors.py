"""Error handling of the commands: errors of hvkeras are printed without a traceback, with the hint last."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from hvkeras.errors import HvkerasError, UsageError, with_hint_last
from hvkeras.launcher.limits import RESOURCE_ERRORS, out_of_resources, require_current_folder

_SIGPIPE = 141  # exit code of a command that SIGPIPE terminates, as in shells


def quiet_after_readers(action: Callable[[], int]) -> int:
    """Run a command, and exit quietly if the reader closes standard output, as in `hvkeras doctor | head -1`.

    Args:
        action: Function of the command, which returns its exit code.

    Returns:
        Its exit code, or 141 after a broken pipe.
    """
    try:
        try:
            return action()
        finally:  # also after --help, where argparse exits
            sys.stdout.flush()
    except BrokenPipeError:
        if not _pipe_is_broken():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at Python's exit
        return _SIGPIPE


def _pipe_is_broken() -> bool:
    polled = select.poll()
    polled.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in polled.poll(0))


def guarded(prog: str, action: Callable[[], int]) -> int:
    """Run a command, and convert errors of hvkeras to a message on standard error and an exit code.

    Args:
        prog: Name of the command in errors.
        action: Function of the command, which returns its exit code.

    Returns:
        Exit code.
    """
    try:
        require_current_folder()
        return action()
    except UsageError as error:
        print(with_hint_last(f"{prog}: {error}"), file=sys.stderr)
        return 2
    except HvkerasError as error:
        print(with_hint_last(f"{prog}: {error}"), file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in RESOURCE_ERRORS:
            raise
        print(with_hint_last(f"{prog}: {out_of_resources(error)}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
