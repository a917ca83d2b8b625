"""Exit report of a job: the first failure, and the exit code."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.errors import PeerError, explain, with_hint_last
from hvkeras.host.console import format_ranks
from hvkeras.launcher.limits import how_to_free_resources
from hvkeras.launcher.printer import CHATTER

TAIL_LINES = 20
TRACEBACK = "Traceback (most recent call last):"
_FAILED = " failed"  # after the name of a rank whose traceback follows
_PREFIX = "hvkeras run: "
_MEMORY = ("the kernel kills processes when memory runs out, which dmesg shows; then use smaller batches or models, or"
           " fewer ranks on this host")
_HEADING = re.compile(rf"{_PREFIX}the standard error of rank \d+ ends with")
_PID = re.compile(r" \(pid \d+\)")
_ALIKE = re.compile(r"; so did ranks? [^;]*, in the same way$")


def described_end(code: int) -> str:
    """Describe the end of a process: `exited with code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def shell_code(code: int) -> int:
    """Return the exit code as in a shell: 128 plus the signal number for a killed process."""
    return code if code >= 0 else 128 - code


def exit_code(cause: Cause | None, codes: dict[int, int]) -> int:
    """Return the exit code of the job: that of the rank that failed first.

    Args:
        cause: Cause of an early end of the job, if any.
        codes: Exit codes of the ranks that ended by themselves, in the order of their ends.
    """
    if cause is None:
        return next((shell_code(code) for code in codes.values() if code), 0)
    own = codes.get(cause.rank, 0) if cause.rank is not None else 0
    return shell_code(own) or cause.exit_code or 1


def with_exit_status(cause: Cause, codes: dict[int, int]) -> Cause:
    """Return the cause, with the exit status of the process if its peers only noticed that it was lost."""
    if cause.kind is CauseKind.LOST and cause.rank is not None and codes.get(cause.rank, 0):
        return dataclasses.replace(cause, error=described_end(codes[cause.rank]))
    return cause


def exit_report(cause: Cause, codes: dict[int, int], tail: str, prefix: str = _PREFIX,
                failed_alike: Sequence[int] = ()) -> str:
    """Format the first failure, with the failed rank's traceback or the end of its standard error.

    Args:
        cause: Cause of the early end of the job.
        codes: Exit codes of the ranks that ended by themselves.
        tail: The end of the failed rank's standard error.
        prefix: Prefix of the launcher's own lines.
        failed_alike: Ranks that failed with the same traceback.
    """
    cause = with_exit_status(cause, codes)
    if cause.error == described_end(-signal.SIGKILL):
        cause = dataclasses.replace(cause, error=f"{cause.error}. HINT: {_MEMORY}")
    sentence = with_hint_last(f"{prefix}{cause.sentence()}")
    also = f"; so did {format_ranks(failed_alike)}, in the same way" if failed_alike else ""
    if cause.traceback:
        return f"{prefix}{cause.who}{_FAILED}{also}\n{cause.traceback.rstrip()}"
    lines = [line for line in tail.rstrip().splitlines() if not CHATTER.match(line)]
    if cause.rank is None or not cause.kind.is_end_of_process or not lines:
        return sentence
    start = next((number for number, line in enumerate(lines) if line == TRACEBACK), None)
    if start is not None:
        end = _FAILED if cause.error == described_end(1) else f" {cause.error}"
        return "\n".join([f"{prefix}{cause.who}{end}{also}", *lines[start:]])
    return "\n".join([f"{prefix}the standard error of rank {cause.rank} ends with", *lines[-TAIL_LINES:], sentence])


def root_cause(stderr: str, code: int) -> str:
    """Return the cause of a job's failure in one line.

    Args:
        stderr: The standard error of `hvkeras run`, which ends with `exit_report` or an error of its own.
        code: The exit code of `hvkeras run`.
    """
    lines = [line for line in stderr.splitlines() if line.strip() and not CHATTER.match(line)]
    prefixed = [index for index, line in enumerate(lines) if line.startswith(_PREFIX)]
    headings = [index for index in prefixed if _HEADING.fullmatch(lines[index])]
    sentences = [index for index in prefixed if index not in headings]
    if not sentences:
        return ": ".join([f"hvkeras run {described_end(code)}", *lines[-1:]])
    last = sentences[-1]
    sentence = _ALIKE.sub("", _PID.sub("", lines[last].removeprefix(_PREFIX)))
    # The failed rank's last line is more helpful than its exit code.
    tail = lines[headings[-1] + 1 : last] if headings else lines[last + 1 :]
    hint = next((line for line in tail if line.startswith("HINT: ")), "")
    told = [line for line in tail if not line.startswith((_PREFIX, "HINT: "))]
    if sentence.endswith(_FAILED) and told:
        sentence = f"{sentence} with {told[-1].strip()}"
    elif told:
        sentence = f"{sentence}: {told[-1].strip()}"
    return f"{sentence} {hint}".rstrip()


def failed_call(stderr: str, code: int) -> PeerError:
    """Return the exception for a function that failed on a rank.

    Args:
        stderr: The end of the standard error of `hvkeras run`.
        code: The exit code of `hvkeras run`.
    """
    return PeerError(f"The function must succeed on every rank, but {root_cause(stderr, code)}")


def start_error(error: str, number: int, culprit: str) -> str:
    """Return the error message for a command that could not be started.

    Args:
        error: Error text of the operating system.
        culprit: The command, or the missing folder.
    """
    hint = "check its spelling, the PATH and the current folder there"
    if culprit.endswith(".py"):
        hint = f"scripts are started by Python: hvkeras run ... python {culprit}"
    return explain(f"The command must start on every host ({error})", how_to_free_resources(number) or hint,
                   command=culprit)
