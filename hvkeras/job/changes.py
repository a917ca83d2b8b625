"""The changes of an elastic job's ranks that this process has gone through, for reports and TensorBoard."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hvkeras.job.session import this_process


@dataclass(frozen=True)
class Change:
    """A change of the ranks of an elastic job.

    Attributes:
        size: The number of ranks since then.
        commit: The commit that training went on from.
        repeated: How many steps after that commit were lost, and are repeated; None if that is not known.
        seconds: Seconds from the moment when the change was noticed until training went on.
        why: Who was lost and why; "" if workers have joined or left.
    """

    size: int
    commit: int
    repeated: int | None
    seconds: float
    why: str = ""

    def sentence(self) -> str:
        """Describes the change, without a subject: `goes on with 3 ranks from commit 12, 0.1 s after ...`."""
        repeats = "" if not self.repeated else f", and repeats {self.repeated} step{'s' * (self.repeated > 1)}"
        return (f"goes on with {self.size} rank{'s' * (self.size > 1)} from commit {self.commit}, {self.seconds:.1f} s"
                f" after {self.why or 'new hosts were found or others removed'}{repeats}")

    def to_message(self) -> dict[str, Any]:
        """Returns the attributes by name."""
        return dataclasses.asdict(self)


def changes() -> list[Change]:
    """Returns the changes that this process has gone through, the latest last; whoever goes through one appends it."""
    return this_process().part(_Changes)


class _Changes(list[Change]):
    """Those of this process."""
