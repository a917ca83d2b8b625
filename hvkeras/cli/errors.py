"""Error handling of the commands: errors of hvkeras end a command with one line, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hvkeras.errors import HvkerasError, UsageError
from hvkeras.launcher.limits import RESOURCE_ERRORS, out_of_resources, require_current_folder


def guarded(prog: str, action: Callable[[], int]) -> int:
    """Runs a command, and turns our errors into one line and an exit code.

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
