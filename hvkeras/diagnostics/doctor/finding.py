"""The result of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"  # a note affects or slows down some jobs; a problem prevents all of them


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        check: What was checked.
        state: `ok`, `note` or `problem`.
        found: What was found, and why it matters.
        fix: What to do about it; "" if there is nothing to do.
    """

    check: str
    state: str
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row as data for JSON."""
        return asdict(self)


def check_result(check: str, found: str, objection: str = "", fix: str = "", state: str = PROBLEM) -> Finding:
    """Makes a finding that is `ok` without an objection, else has `state` and `found` followed by the objection."""
    return Finding(check, state, f"{found}: {objection}", fix) if objection else Finding(check, OK, found)
