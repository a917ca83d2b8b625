"""Exit report of a job: what failed first, and the exit code."""

from __future__ import annotations

import dataclasses
import re
import signal

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.errors import explain
from hvkeras.launcher.limits import how_to_free_resources
from hvkeras.launcher.printer import CHATTER

TAIL_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = "hvkeras run: "
_HEADING = re.compile(rf"{_PREFIX}the standard error of rank \d+ ends with")
_PID = re.compile(r" \(pid \d+\)")


def described_end(code: int) -> str:
    """Describes how a process ended: `exited with code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def shell_code(code: int) -> int:
    """Returns the exit code that a shell shows for a process: 128 plus the signal number for a killed one."""
    return code if code >= 0 else 128 - code


def exit_code(cause: Cause | None, codes: dict[int, int]) -> int:
    """Returns the job's exit code: that of the rank that failed first.

    Args:
        cause: Why the job ended early, if it did.
        codes: Exit codes of the ranks that ended by themselves, in the order in which they ended.
    """
    if cause is None:
        return next((shell_code(code) for code in codes.values() if code), 0)
    own = codes.get(cause.rank, 0) if cause.rank is not None else 0
    return shell_code(own) or cause.exit_code or 1


def with_exit_status(cause: Cause, codes: dict[int, int]) -> Cause:
    """Returns the cause, completed with how the process ended if the ranks saw only that it was lost."""
    if cause.kind is CauseKind.LOST and cause.rank is not None and codes.get(cause.rank, 0):
        return dataclasses.replace(cause, error=described_end(codes[cause.rank]))
    return cause


def exit_report(cause: Cause, codes: dict[int, int], tail: str, prefix: str = _PREFIX) -> str:
    """Formats what failed first, with the failed rank's traceback or the end of its standard error.

    Args:
        cause: Why the job ended early.
        codes: Exit codes of the ranks that ended by themselves.
        tail: The end of the failed rank's standard error.
        prefix: What the launcher's own lines begin with.
    """
    cause = with_exit_status(cause, codes)
    sentence = f"{prefix}{cause.sentence()}"
    if cause.traceback:
        return f"{sentence}\n{cause.traceback.rstrip()}"
    lines = [line for line in tail.rstrip().splitlines() if not CHATTER.match(line)]
    if cause.rank is None or not cause.kind.is_end_of_process or not lines:
        return sentence
    heading = f"{prefix}the standard error of rank {cause.rank} ends with"
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if starts:
        return "\n".join([sentence, heading, *lines[starts[-1] :]])
    return "\n".join([heading, *lines[-TAIL_LINES:], sentence])


def root_cause(stderr: str, code: int) -> str:
    """Finds why a job failed, in one line.

    Args:
        stderr: The standard error of `hvkeras run`, which ends with `exit_report` or an error of its own.
        code: Its exit code.
    """
    lines = [line for line in stderr.splitlines() if line.strip() and not CHATTER.match(line)]
    prefixed = [index for index, line in enumerate(lines) if line.startswith(_PREFIX)]
    headings = [index for index in prefixed if _HEADING.fullmatch(lines[index])]
    sentences = [lines[index].removeprefix(_PREFIX) for index in prefixed if index not in headings]
    if not sentences:
        return ": ".join([f"hvkeras run {described_end(code)}", *lines[-1:]])
    sentence = _PID.sub("", sentences[-1])
    if not headings:
        return sentence
    # The failed rank's own last line says more than its exit code.
    tail = [line for line in lines[headings[-1] + 1 :] if not line.startswith(_PREFIX)]
    return ": ".join([sentence, *(line.strip() for line in tail[-1:])])


def why_not_started(error: str, number: int, culprit: str) -> str:
    """Explains why a command could not be started.

    Args:
        error: The system's error text.
        number: The system's error number.
        culprit: The command, or the missing folder.
    """
    hint = "check its spelling, the PATH and the current folder there"
    if culprit.endswith(".py"):
        hint = f"scripts are started by Python: hvkeras run ... python {culprit}"
    return explain(f"The command must start on every host ({error})", how_to_free_resources(number) or hint,
                   command=culprit)
