"""Outcome of a job according to its launcher, stored next to the records for reports."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvkeras.host.files import write_durably

_NAME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a finished job of `hvkeras run`.

    Attributes:
        hosts: Host of each rank.
        ended: End of each rank's process, by rank as a string.
        cause: Why the job ended early, or "".
        stalls: Stall warnings.
        changes: Changes of an elastic job's ranks (`hvkeras.job.session.Change`), with their times in seconds since
            the epoch.
        first_size: Number of ranks before the first change; 0 without changes.
        began: Start time of an elastic job, in seconds since the epoch.
    """

    size: int
    hosts: list[str]
    ended: dict[str, str] = field(default_factory=dict)
    cause: str = ""
    stalls: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    first_size: int = 0
    began: float = 0.0

    def write(self, folder: Path) -> None:
        """Write the outcome into the folder of the records."""
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _NAME, json.dumps(dataclasses.asdict(self), indent=2))

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """Read the outcome; return None if no launcher has written one."""
        path = folder / _NAME
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the outcome of an earlier job."""
        (folder / _NAME).unlink(missing_ok=True)
