"""Summary of one job for a report, computed from the records of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.diagnostics.outcome import Outcome
from hvkeras.diagnostics.record import GATHER, WELL, Record
from hvkeras.diagnostics.time_split import TimeSplit, pauses, runs_by_key, shortest_times, time_splits
from hvkeras.errors import MachineError, explain
from hvkeras.host.machine import oversubscription

RUNNING = "was running when its record was last written, or was killed"
UNREADABLE = "its record cannot be read"


@dataclass(frozen=True)
class CollectiveSummary:
    """Collective that ran in training.

    Attributes:
        label: Name in messages.
        operation: `gradients`, `allgather`, ...
        how: Qualifiers of the operation: `average`, ...
        bytes: Bytes of this rank's tensors; None if unknown.
        runs: Number of runs, on the rank that recorded the most.
        seconds: Median time, without waiting for late ranks unless records of some ranks are missing.
    """

    label: str
    operation: str
    how: str
    bytes: int | None
    runs: int
    seconds: float

    @property
    def rate(self) -> float | None:
        """Throughput in bytes of a rank's tensors per second; None if unknown."""
        return None if self.bytes is None or not self.seconds else self.bytes / self.seconds


@dataclass(frozen=True)
class Summary:
    """Summary of one job.

    Attributes:
        folder: Folder of the records.
        records: Record of each rank; None if it is missing or unreadable.
        outcome: Outcome of the job; None unless its launcher was `hvkeras run`.
        splits: Time breakdown of a typical step, by rank.
        collectives: Collectives of training, in descending order of total time.
        unreadable: Ranks whose records are damaged.
    """

    folder: Path
    size: int
    records: Sequence[Record | None]
    outcome: Outcome | None
    splits: Mapping[int, TimeSplit]
    collectives: Sequence[CollectiveSummary]
    unreadable: frozenset[int] = frozenset()

    @classmethod
    def of(cls, folder: Path) -> Summary:
        """Summarize the records in a folder.

        Args:
            folder: Folder of the report or of the records.

        Raises:
            MachineError: The folder contains neither records nor an outcome.
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
            except Exception:  # noqa: BLE001 - NumPy may raise anything for a damaged file
                unreadable.add(rank)
        sizes = [record.size for record in found.values() if record is not None]
        size = outcome.size if outcome is not None else max([*sizes, *(rank + 1 for rank in unreadable)])
        records = [found.get(rank) for rank in range(size)]
        return cls(folder, size, records, outcome, time_splits(records), _collectives(records), frozenset(unreadable))

    @property
    def present(self) -> list[Record]:
        """Records of the ranks that have one."""
        return [record for record in self.records if record is not None]

    @property
    def backend(self) -> str:
        """Name of the backend; "" if there is no record."""
        return next((record.backend for record in self.present), "")

    @property
    def host_count(self) -> int:
        """Number of hosts of the ranks that have a record."""
        return len({record.host for record in self.present})

    @property
    def shares_update(self) -> bool:
        """Return whether the optimizer's update is sharded."""
        return any(each.operation == GATHER for each in self.collectives)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """What became of functions that the ranks carry out together; see `Record.functions`."""
        return next((record.functions for record in self.present), [])

    @property
    def steps(self) -> int:
        """Number of steps, on the rank that recorded the most."""
        return max((record.first_step + len(record.stamps) for record in self.present), default=0)

    @property
    def seconds(self) -> float:
        """Duration of the recording in seconds, on the rank that recorded longest."""
        return max((record.written - record.began for record in self.present), default=0.0)

    @property
    def stalls(self) -> list[str]:
        """Stall warnings."""
        own = [text for record in self.present for text in record.stalls]
        return own + (self.outcome.stalls if self.outcome is not None else [])

    def host(self, rank: int) -> str:
        """Return the host of a rank; "" if unknown."""
        record = self.records[rank]
        if record is not None and record.host:
            return record.host
        return self.outcome.hosts[rank] if self.outcome is not None else ""

    def samples(self, rank: int) -> int | None:
        """Return the samples that a rank has computed in training steps; None if unknown."""
        record = self.records[rank]
        if record is None or record.no_samples or not len(record.stamps):
            return None
        return int(record.stamps[-1, 1]) or None

    def name(self, rank: int) -> str:
        """Return a rank and its host, for messages."""
        return f"rank {rank} on {self.host(rank)}" if self.host(rank) else f"rank {rank}"

    def end(self, rank: int) -> str:
        """Return how a rank ended: `WELL`, or a description of its failure."""
        record, process = self.records[rank], self.outcome.ended.get(str(rank), "") if self.outcome is not None else ""
        if record is not None and record.ended:
            # Only the launcher sees a process fail after it recorded a normal end.
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
        """Fraction of training spent in steps with a pause, on the rank where it is largest."""
        found = [pauses(record) for record in self.present]
        return max((seconds / total for seconds, total in found if total), default=0.0)


    @property
    def oversubscription(self) -> list[str]:
        """Messages about hosts whose ranks share cores; those of ranks on GPUs may."""
        found = []
        for host, own in self._by_host().items():
            cores = {core for record in own for core in record.cores}
            limit = min([len(cores), *(record.core_limit for record in own if record.core_limit)])
            text = oversubscription(len(own), limit, host) if cores else ""
            if text and not any(record.gpu for record in own):
                found.append(f"{text}: start fewer ranks there.")
        return found

    @property
    def other_load(self) -> tuple[float, str]:
        """Largest fraction of the ranks' cores that other processes used in the recording, and its host; 0 if unknown.

        Ranks that share some of their cores, but not all, are left out.
        """
        found = [(0.0, "")]
        for host, own in self._by_host().items():
            groups = {tuple(record.cores): [one for one in own if one.cores == record.cores] for record in own}
            cores = [core for group in groups for core in group]
            if len(cores) != len(set(cores)):
                continue
            for group, ranks in groups.items():
                rates = [(record.busy / seconds, record.used / seconds) for record in ranks
                         if (seconds := record.written - record.began) > 0]
                if group and rates:
                    others = max(busy for busy, _ in rates) - sum(used for _, used in rates)
                    found.append((min(1.0, max(0.0, others) / len(group)), host))
        return max(found)

    def _by_host(self) -> dict[str, list[Record]]:
        hosts = dict.fromkeys(record.host for record in self.present)
        return {host: [record for record in self.present if record.host == host] for host in hosts}


def _collectives(records: Sequence[Record | None]) -> list[CollectiveSummary]:
    present = [record for record in records if record is not None]
    found = []
    for key, (lengths, _) in shortest_times([runs_by_key(record) for record in present]).items():
        known = [record for record in present if key in record.collectives]
        content = known[0].buckets.get(key, {})
        runs = max(record.first_runs.get(key, 0) + len(record.collectives[key]) for record in known)
        found.append(CollectiveSummary(str(content.get("label", key)), str(content.get("operation", "")),
                                str(content.get("how", "")), content.get("bytes"), runs, float(np.median(lengths))))
    return sorted(found, key=lambda each: -each.runs * each.seconds)
