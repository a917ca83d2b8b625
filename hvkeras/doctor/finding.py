"""One thing that was looked at, and what was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"  # a note hinders some jobs, or makes them slower; a problem stops all


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        check: What was looked at.
        state: `ok`, `note` or `problem`.
        found: What was found, and why it matters.
        fix: What to do about it; "" if nothing.
    """

    check: str
    state: str
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return asdict(self)


def judged(check: str, found: str, objection: str = "", fix: str = "", state: str = PROBLEM) -> Finding:
    """Makes a finding that is `ok` without an objection, else `state`, with the objection behind what was found."""
    return Finding(check, state, f"{found}: {objection}", fix) if objection else Finding(check, OK, found)
