"""Trace files of a job: one per rank, written atomically, and the merged file.

Ranks write `trace.rank.0.json` and so on next to `trace.json`. All of them use the common clock, so merging mostly
concatenates the events.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.console import format_ranks

if TYPE_CHECKING:
    from hvkeras.diagnostics.record import Record  # imports NumPy, which the launcher does without

Event = dict[str, Any]

_RANK_FILE = re.compile(r"(.+)\.rank\.(\d+)((?:\.[^.]*)?)")
_NEEDED = {"size", "steps", "machine", "missing_steps", "done", "clock_offset", "clock_uncertainty"}
VIEWER = "ui.perfetto.dev"


def process_name(record: Record) -> list[Event]:
    """Return the metadata events that name a rank and sort the ranks.

    Args:
        record: Record of the rank.
    """
    name = f"rank {record.rank} on {record.host}, pid {record.pid}"
    return [{"name": "process_name", "ph": "M", "pid": record.rank, "args": {"name": name}},
            {"name": "process_sort_index", "ph": "M", "pid": record.rank, "args": {"sort_index": record.rank}}]


def rank_file(path: Path, rank: int) -> Path:
    """Return the path of a rank's trace file."""
    return path.with_name(f"{path.stem}.rank.{rank}{path.suffix}")


def rank_files(path: Path) -> dict[int, Path]:
    """Return the existing trace files of ranks, by rank."""
    return {int(match[2]): path.with_name(file) for file in os.listdir(path.parent)
            if (match := _RANK_FILE.fullmatch(file)) and (match[1], match[3]) == (path.stem, path.suffix)}


@dataclass(frozen=True)
class Merged:
    """Merged trace.

    Attributes:
        ranks: Ranks in the trace.
        missing: Ranks of the job without a file.
        cut_off: Ranks with missing steps.
        no_steps: Why steps are not recorded, or "".
        uncertainty: Maximum error between the times of two ranks, in seconds; None if unknown.
    """

    path: Path
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    cut_off: tuple[int, ...]
    no_steps: str
    uncertainty: float | None

    def sentence(self) -> str:
        """Return a one-sentence summary of the trace."""
        text = f"trace of {format_ranks(self.ranks)} in {self.path}, to be opened at {VIEWER}"
        if self.no_steps:
            text += f"; steps are not recorded: {self.no_steps}"
        elif self.cut_off:
            text += f"; {format_ranks(self.cut_off)} ended before the window did"
        if self.missing:
            text += f"; {format_ranks(self.missing)} left no file here (hvkeras trace merges again)"
        if self.uncertainty is None:
            text += "; not all clocks could be compared"
        elif self.uncertainty:
            text += f"; the clocks of the hosts agree within {1000 * self.uncertainty:.3g} ms"
        return text


def write(path: Path, events: Iterable[Event], facts: dict[str, Any]) -> None:
    """Write a trace atomically.

    Args:
        events: Trace events.
        facts: Metadata, which viewers show along with the trace. For a rank's file: `size`; `machine`, an ID of the
            host; `steps`, the window as a string; `missing_steps`, their number; `done`, True in the rank's last
            write; `clock_offset`, which the times include; and `clock_uncertainty`.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts})[:-1]
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            file.write(f'{head}, "traceEvents": [\n' + ",\n".join(json.dumps(event) for event in events) + "\n]}\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def parts(path: Path) -> dict[int, dict[str, Any]]:
    """Read the rank files of the latest job, by rank.

    Raises:
        UsageError: A file is not a rank's trace.
    """
    found = rank_files(path)
    if not found:
        return {}
    latest = max(found, key=lambda rank: (found[rank].stat().st_mtime, -rank))
    read = {rank: _read(file) for rank, file in sorted(found.items())}
    # Ignores files of an earlier job with a different size or window.
    of_job = [read[latest]["otherData"][name] for name in ("size", "steps")]
    return {rank: part for rank, part in read.items()
            if [part["otherData"][name] for name in ("size", "steps")] == of_job}


def _read(file: Path) -> dict[str, Any]:
    try:
        part: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        is_valid = isinstance(part["traceEvents"], list) and part["otherData"].keys() >= _NEEDED
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UsageError(explain("Files with names such as trace.rank.0.json must be traces of ranks",
                                 "move it away", file=str(file)))
    return part


def merge(path: Path) -> Merged | None:
    """Merge the existing rank files of a trace.

    Args:
        path: Path of the merged file, which is replaced if it exists.

    Returns:
        Description of the merged trace; None if there are no rank files.

    Raises:
        MachineError: The file cannot be written.
        UsageError: A file is not a rank's trace.
    """
    found = parts(path)
    if not found:
        return None
    uncertainty = _share_clocks(list(found.values()))
    facts = {rank: part["otherData"] for rank, part in found.items()}
    first = next(iter(facts.values()))
    missing = tuple(rank for rank in range(first["size"]) if rank not in found)
    try:
        write(path, (event for part in found.values() for event in part["traceEvents"]),
              {"steps": first["steps"], "size": first["size"], "missing": missing, "ranks": facts})
    except OSError as error:
        raise MachineError(explain(f"The trace's file must be writable ({error.strerror})", "choose another folder",
                                   trace_file=str(path))) from None
    return Merged(path, tuple(found), missing, tuple(rank for rank in found if facts[rank]["missing_steps"]),
                  next((str(fact["no_steps"]) for fact in facts.values() if fact.get("no_steps")), ""),
                  uncertainty)


def _share_clocks(found: Sequence[dict[str, Any]]) -> float | None:
    """Apply the best clock offset of each machine to all of its ranks, since they share one clock.

    Return the maximum error between the times of two machines, in seconds; None if unknown.
    """
    best: dict[str, tuple[float, float]] = {}
    for facts in (part["otherData"] for part in found):
        uncertainty = math.inf if facts["clock_uncertainty"] is None else facts["clock_uncertainty"]
        mine = (uncertainty, facts["clock_offset"])
        best[facts["machine"]] = min(best.get(facts["machine"], mine), mine)
    for part in found:
        facts = part["otherData"]
        uncertainty, offset = best[facts["machine"]]
        shift = 1e6 * (offset - facts["clock_offset"])
        for event in part["traceEvents"]:
            if shift and "ts" in event:
                event["ts"] = round(event["ts"] + shift, 3)
        facts.update(clock_offset=offset, clock_uncertainty=None if uncertainty == math.inf else uncertainty)
    worst = sum(sorted(uncertainty for uncertainty, _ in best.values())[-2:]) if len(best) > 1 else 0.0
    return None if worst == math.inf else worst


def merge_all(index: Path) -> list[Merged]:
    """Merge every trace in a folder, or a single trace.

    Args:
        index: A folder, or a merged file, which need not exist.

    Raises:
        MachineError: A file cannot be written.
        UsageError: No rank file was found.
    """
    folder = index if index.is_dir() else index.parent
    names = os.listdir(folder) if folder.is_dir() else []
    found = {folder / f"{match[1]}{match[3]}" for name in names if (match := _RANK_FILE.fullmatch(name))}
    merged = [merge(path) for path in sorted(found) if index.is_dir() or path.name == index.name]
    if not merged:
        raise UsageError(explain("Ranks must have written traces there, in files such as trace.rank.0.json",
                                 "record with hvkeras run --trace-steps 100:120, and name that folder or trace file",
                                 place=str(index)))
    return [one for one in merged if one is not None]

