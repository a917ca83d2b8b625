"""Cause of a job's failure: one failed rank, or a disagreement between ranks."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

ENDED = "ended unexpectedly (killed, crashed, or out of memory)"  # the connection ended unexpectedly
_PLACE = re.compile(r", at [^,]+:\d+ in \S+$")  # the user's line, at the end of an error (hvkeras.errors.summary)
_MAX_ERROR = 10_000  # characters; the rest of an error is cut off
_MAX_TRACEBACK = 60_000  # characters; the beginning of a longer traceback is cut off


class CauseKind(enum.Enum):
    """Kind of failure that ends a job."""

    EXCEPTION = "exception"  # Python raised one
    EXIT = "exit"  # the process exited with a code other than 0
    SIGNAL = "signal"
    LOST = "lost"  # the connection broke: killed, crashed, or out of memory
    SILENT = "silent"  # no heartbeat
    MISMATCH = "mismatch"  # ranks wait for each other
    STALLED = "stalled"  # a rank made no progress for too long
    TIMEOUT = "timeout"  # an engine's timeout for other ranks
    LEFT = "left"  # a rank left while others needed it
    SETUP = "setup"  # the ranks could not connect
    RESET = "reset"  # the membership of an elastic job changes

    @property
    def leaves_others_intact(self) -> bool:
        """True if the other ranks may continue, provided that only one rank is at fault."""
        return self in _SINGLE_RANK

    @property
    def may_pass(self) -> bool:
        """True if a restart may help."""
        return self is not CauseKind.SETUP

    @property
    def is_unresponsive(self) -> bool:
        """True if the rank's process still exists, but cannot be expected to exit by itself."""
        return self in (CauseKind.SILENT, CauseKind.STALLED)

    @property
    def is_end_of_process(self) -> bool:
        """True if only the end of the rank's process was observed, so that its own output has more details."""
        return self in (CauseKind.LOST, CauseKind.EXIT, CauseKind.SIGNAL)


_SINGLE_RANK = frozenset({CauseKind.EXCEPTION, CauseKind.EXIT, CauseKind.SIGNAL, CauseKind.LOST, CauseKind.SILENT,
                          CauseKind.STALLED, CauseKind.RESET})


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first failure of a job, as all ranks and the launcher report it.

    Attributes:
        rank: The failed rank; None when no single rank is at fault.
        host: Its host, or "".
        pid: Its process id, or None.
        error: One line: the exception, or what was observed.
        traceback: The failed rank's Python traceback, or "".
        exit_code: The exit code of the failed rank if it is known, else 1.
    """

    kind: CauseKind
    rank: int | None
    host: str
    pid: int | None
    error: str
    traceback: str = ""
    exit_code: int = 1

    @property
    def who(self) -> str:
        """The failed rank: `rank 1 on node2 (pid 7)`; "" when no single rank is at fault."""
        return "" if self.rank is None else f"rank {self.rank} on {self.host}" + f" (pid {self.pid})" * bool(self.pid)

    def sentence(self, brief: bool = False) -> str:
        """Return the cause in one line, with rank and host: `rank 1 on node2 (pid 7) failed with ValueError: x`.

        Args:
            brief: Omit what was received, and the hint.
        """
        error = self.error
        if brief:
            place = _PLACE.search(error)
            error = re.split(r" Received: | HINT: ", error[: place.start() if place else None])[0].removesuffix(".")
            error += place[0] if place else ""
        return f"{self.who} {error}".lstrip()

    def to_message(self) -> dict[str, Any]:
        """Return the cause as plain data, with long texts truncated."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "error": self.error[:_MAX_ERROR],
                "traceback": self.traceback[-_MAX_TRACEBACK:]}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Cause:
        """Return the cause from the result of `to_message`."""
        fields = {field.name: message[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**fields, "kind": CauseKind(message["kind"])})


def silent_for(seconds: float) -> str:
    """Return the error of a process that sends no heartbeats, as the end of a sentence."""
    return f"gave no sign of life for {seconds:g} s (stopped, frozen or cut off)"
