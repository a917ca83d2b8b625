"""The cause of a job's failure: one failed rank, or a disagreement between ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

_ERROR = 10_000  # characters of an error, at its beginning, that are sent
_TRACEBACK = 60_000  # characters of a traceback, at its end, that are sent


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first failure of a job, as all ranks and the launcher report it.

    Attributes:
        kind: `exception`, `exit`, `signal`, `lost`, `silent`, `mismatch`, `stalled`, `timeout` (an engine gave up
            waiting for other ranks), `left` or `setup`.
        rank: The failed rank; None when no single rank is at fault.
        host: Its host, or "".
        pid: Its process id, or None.
        error: One line: the exception, or what was observed.
        traceback: The failed rank's Python traceback, or "".
        exit_code: The exit code of the failed rank if it is known, else 1.
    """

    kind: str
    rank: int | None
    host: str
    pid: int | None
    error: str
    traceback: str = ""
    exit_code: int = 1

    def sentence(self) -> str:
        """The cause in one line, with rank and host: `rank 1 on node2 (pid 7) failed with ValueError: x`."""
        if self.rank is None:
            return self.error
        who = f"rank {self.rank} on {self.host}" + (f" (pid {self.pid})" if self.pid else "")
        return f"{who} {self.error}"

    def to_message(self) -> dict[str, Any]:
        """The cause as plain data, without the middle of what is too long."""
        return {**dataclasses.asdict(self), "error": self.error[:_ERROR], "traceback": self.traceback[-_TRACEBACK:]}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Cause:
        """The inverse of `to_message`."""
        return cls(**{field.name: message[field.name] for field in dataclasses.fields(cls)})
