"""How a job ended, as its launcher saw it: beside the records, for reports."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

_NAME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """What `hvkeras run` knows of a job that is over.

    Attributes:
        size: How many ranks it had.
        hosts: Each rank's host.
        ended: How each rank's process ended, by its number as text.
        cause: Why the job ended early, or "".
        stalls: What was said of late ranks.
    """

    size: int
    hosts: list[str]
    ended: dict[str, str] = field(default_factory=dict)
    cause: str = ""
    stalls: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Writes it beside the records."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _NAME).write_text(json.dumps(dataclasses.asdict(self), indent=2))

    @classmethod
    def read(cls, folder: Path) -> Outcome | None:
        """Reads it; None where no launcher has left one."""
        path = folder / _NAME
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    @staticmethod
    def remove(folder: Path) -> None:
        """Removes that of an earlier job."""
        (folder / _NAME).unlink(missing_ok=True)
