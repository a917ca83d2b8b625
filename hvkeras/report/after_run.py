"""The report that is written when a job is over: by its launcher, or by rank 0 where that is not `hvkeras run`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hvkeras.errors import HvkerasError
from hvkeras.report.outcome import Outcome

PATIENCE = 5.0  # seconds that rank 0 waits for the last records of other ranks
TICK = 0.1


def reports_to(settings: Any) -> Path | None:
    """The folder of the report that settings ask for; what `hvkeras compare` records is reported by it alone."""
    return Path(settings.report) if settings.report and not settings.record else None


def forget_run(folder: Path | None) -> None:
    """Removes the records of an earlier job."""
    if folder is not None:
        from hvkeras.records.record import remove

        Outcome.remove(folder / "records")
        remove(folder / "records")


def tell_outcome(folder: Path | None, outcome: Outcome) -> None:
    """Leaves beside the records how the job ended."""
    if folder is not None:
        try:
            outcome.write(folder / "records")
        except OSError:
            return  # the report, which is written next, says why


def report_on_run(folder: Path) -> str:
    """Writes the report.

    Returns:
        The line that says where it is, or why there is none.
    """
    from hvkeras.report.run_report import write_report

    try:
        return f"hvkeras: the report on this run is {write_report(folder)}"
    except Exception as error:  # noqa: BLE001 - the job has an end of its own, which a report must not change
        why = str(error) if isinstance(error, (HvkerasError, OSError)) else f"{type(error).__name__}: {error}"
        return f"hvkeras: there is no report on this run: {why}"


def await_records(folder: Path, size: int) -> None:
    """Waits until all ranks have written their last record, or long enough."""
    deadline = time.monotonic() + PATIENCE
    waiting = set(range(size))
    while waiting and time.monotonic() < deadline:
        waiting = {rank for rank in waiting if not _is_over(folder, rank)}
        time.sleep(TICK if waiting else 0)


def _is_over(folder: Path, rank: int) -> bool:
    from hvkeras.records.record import Record

    try:
        record = Record.read(folder / "records", rank)
    except Exception:  # noqa: BLE001 - whatever numpy says of a damaged file
        return True
    return record is not None and bool(record.ended)
