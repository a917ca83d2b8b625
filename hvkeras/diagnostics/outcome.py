"""Outcome of a job as seen by its launcher: stored next to the records, for reports."""

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
    """What `hvkeras run` knows about a finished job.

    Attributes:
        size: The number of ranks.
        hosts: The host of each rank.
        ended: How each rank's process ended, by the rank as text.
        cause: Why the job ended early, or "".
        stalls: The warnings about late ranks.
        changes: The changes of an elastic job's ranks (`hvkeras.job.session.Change`), each with its time in seconds
            since the epoch.
        first_size: The number of ranks before the first of them; 0 without any.
        began: When an elastic job began, in seconds since the epoch.
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
        """Write it next to the records."""
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _NAME, json.dumps(dataclasses.asdict(self), indent=2))

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """Read it; None if no launcher has written one."""
        path = folder / _NAME
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the outcome of an earlier job."""
        (folder / _NAME).unlink(missing_ok=True)
