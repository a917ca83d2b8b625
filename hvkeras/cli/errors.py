"""Error handling of the commands: errors of hvkeras end a command with one line, without a traceback."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from hvkeras.errors import HvkerasError, UsageError
from hvkeras.launcher.limits import RESOURCE_ERRORS, out_of_resources, require_current_folder

_SIGPIPE = 141  # the exit code of a command that the signal ends, as shells tell it


def quiet_after_readers(action: Callable[[], int]) -> int:
    """Run a command whose output may be read in part alone, as by `hvkeras doctor | head -1`.

    Args:
        action: The function that does the command's work.

    Returns:
        Its exit code, or 141 if nobody reads standard output any more.
    """
    try:
        try:
            return action()
        finally:  # of help, too, after which argparse exits
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed when Python ends
        return _SIGPIPE


def _reader_is_gone() -> bool:
    polled = select.poll()
    polled.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in polled.poll(0))


def guarded(prog: str, action: Callable[[], int]) -> int:
    """Run a command, and turns our errors into one line and an exit code.

    Args:
        prog: What the command is called in errors.
        action: The function that does the command's work.

    Returns:
        The exit code.
    """
    try:
        require_current_folder()
        return action()
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except HvkerasError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in RESOURCE_ERRORS:
            raise
        print(f"{prog}: {out_of_resources(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
