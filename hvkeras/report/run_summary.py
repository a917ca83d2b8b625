"""What the records of one job say of it, put together for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvkeras.errors import MachineError, explain
from hvkeras.records.record import WELL, Record
from hvkeras.records.time_split import TimeSplit, pauses, shortest_runs, time_splits
from hvkeras.report.outcome import Outcome

RUNNING = "was running when its record was last written, or was killed"
UNREADABLE = "its record cannot be read"


@dataclass(frozen=True)
class Collective:
    """A collective that ran in training.

    Attributes:
        label: How messages call it.
        operation: What it does.
        bytes: This rank's tensors; None if unknown.
        runs: How often it ran, on the rank that knows of most.
        seconds: Its median time without waiting for late ranks, or with it where not all ranks have left a record.
    """

    label: str
    operation: str
    bytes: int | None
    runs: int
    seconds: float

    @property
    def rate(self) -> float | None:
        """Bytes of a rank's tensors in a second; None if unknown."""
        return None if self.bytes is None or not self.seconds else self.bytes / self.seconds


@dataclass(frozen=True)
class Summary:
    """One job.

    Attributes:
        folder: Where its records lie.
        size: How many ranks it had.
        records: What each rank recorded; None where there is nothing to be read.
        outcome: What the launcher saw, if it was `hvkeras run`.
        splits: Where the time of a typical step goes, by rank.
        collectives: Those of training, the one that takes most of the time first.
        unreadable: The ranks whose record is damaged.
    """

    folder: Path
    size: int
    records: Sequence[Record | None]
    outcome: Outcome | None
    splits: Mapping[int, TimeSplit]
    collectives: Sequence[Collective]
    unreadable: frozenset[int] = frozenset()

    @classmethod
    def of(cls, folder: Path) -> Summary:
        """Reads what lies in a folder.

        Args:
            folder: The folder of the report, or that of the records.

        Raises:
            MachineError: There is nothing.
        """
        folder = folder / "records" if (folder / "records").is_dir() else folder
        outcome = Outcome.read(folder)
        numbers = [int(path.name.split(".")[1]) for path in folder.glob("rank.*.npz")
                   if path.name.split(".")[1].isdecimal()]
        if outcome is None and not numbers:
            raise MachineError(explain("A report needs the records of ranks", "train with hvkeras run --report, or set"
                                       " HVKERAS_REPORT", folder=str(folder)))
        found: dict[int, Record | None] = {}
        unreadable = set()
        for rank in numbers:
            try:
                found[rank] = Record.read(folder, rank)
            except Exception:  # noqa: BLE001 - whatever numpy says of a damaged file, the others are read
                unreadable.add(rank)
        sizes = [record.size for record in found.values() if record is not None]
        size = outcome.size if outcome is not None else max([*sizes, *(rank + 1 for rank in unreadable)])
        records = [found.get(rank) for rank in range(size)]
        return cls(folder, size, records, outcome, time_splits(records), _collectives(records), frozenset(unreadable))

    @property
    def there(self) -> list[Record]:
        """The records that there are."""
        return [record for record in self.records if record is not None]

    @property
    def backend(self) -> str:
        """The engine; "" if no rank tells."""
        return next((record.backend for record in self.there), "")

    @property
    def steps(self) -> int:
        """How many steps were made, by the rank that knows of most."""
        return max((record.first_step + len(record.stamps) for record in self.there), default=0)

    @property
    def seconds(self) -> float:
        """How long ranks recorded."""
        return max((record.written - record.began for record in self.there), default=0.0)

    @property
    def stalls(self) -> list[str]:
        """What was said of late ranks."""
        own = [text for record in self.there for text in record.stalls]
        return own + (self.outcome.stalls if self.outcome is not None else [])

    def host(self, rank: int) -> str:
        """Where a rank ran; "" if nobody tells."""
        record = self.records[rank]
        if record is not None and record.host:
            return record.host
        return self.outcome.hosts[rank] if self.outcome is not None else ""

    def name(self, rank: int) -> str:
        """A rank and its host, for sentences."""
        return f"rank {rank} on {self.host(rank)}" if self.host(rank) else f"rank {rank}"

    def end(self, rank: int) -> str:
        """How a rank ended: `WELL`, or what happened to it."""
        record, process = self.records[rank], self.outcome.ended.get(str(rank), "") if self.outcome is not None else ""
        if record is not None and record.ended:
            # A process that ended well by its own account, and failed later, has told its launcher alone.
            return process if record.ended == WELL and process else record.ended
        if process:
            return process
        if rank in self.unreadable:
            return UNREADABLE
        if self.outcome is not None:  # the launcher saw it end well
            return WELL
        return RUNNING if record is not None else "left no record"

    @property
    def pause_share(self) -> float:
        """The part of training that went by in steps with a pause, on the rank that spent most in them."""
        found = [pauses(record) for record in self.there]
        return max((seconds / whole for seconds, whole in found if whole), default=0.0)


def _collectives(records: Sequence[Record | None]) -> list[Collective]:
    there = [record for record in records if record is not None]
    shortest = shortest_runs(there)
    found = []
    for key, (lengths, _) in shortest.items():
        known = [record for record in there if key in record.collectives]
        content = known[0].buckets.get(key, {})
        runs = max(record.first_runs.get(key, 0) + len(record.collectives[key]) for record in known)
        found.append(Collective(str(content.get("label", key)), str(content.get("operation", "")),
                                content.get("bytes"), runs, float(np.median(lengths))))
    return sorted(found, key=lambda each: -each.runs * each.seconds)
