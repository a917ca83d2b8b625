"""Report at the end of a job: written by `hvkeras run`, or by rank 0 under any other launcher."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hvkeras.diagnostics.outcome import Outcome
from hvkeras.errors import HvkerasError

PATIENCE = 5.0  # seconds that rank 0 waits for the last records of other ranks
TICK = 0.1


def report_folder(settings: Any) -> Path | None:
    """Return the folder of the report that the settings request; None under `hvkeras compare`, which writes its own."""
    return Path(settings.report) if settings.report and not settings.record else None


def remove_run(folder: Path | None) -> None:
    """Remove the records and the outcome of an earlier job."""
    if folder is not None:
        from hvkeras.diagnostics.record import remove  # noqa: PLC0415 - imports NumPy; the launcher does not

        Outcome.remove(folder / "records")
        remove(folder / "records")


def write_outcome(folder: Path | None, outcome: Outcome) -> None:
    """Write the outcome of the job next to the records."""
    if folder is not None:
        try:
            outcome.write(folder / "records")
        except OSError:
            return  # writing the report fails next, and reports the error


def report_on_run(folder: Path) -> str:
    """Write the report.

    Returns:
        A message with the path of the report, or the reason why there is none.
    """
    from hvkeras.diagnostics.run_report import write_report  # noqa: PLC0415 - imports NumPy; the launcher does not

    try:
        return f"hvkeras: the report on this run is {write_report(folder)}"
    except Exception as error:  # noqa: BLE001 - a failed report must not change how the job ends
        reason = str(error) if isinstance(error, (HvkerasError, OSError)) else f"{type(error).__name__}: {error}"
        return f"hvkeras: there is no report on this run: {reason}"


def await_records(folder: Path, size: int) -> None:
    """Wait up to `PATIENCE` seconds until all ranks have written their last record."""
    deadline = time.monotonic() + PATIENCE
    waiting = set(range(size))
    while waiting and time.monotonic() < deadline:
        waiting = {rank for rank in waiting if not _has_ended(folder, rank)}
        time.sleep(TICK if waiting else 0)


def _has_ended(folder: Path, rank: int) -> bool:
    from hvkeras.diagnostics.record import Record  # noqa: PLC0415 - imports NumPy; the launcher does not

    try:
        record = Record.read(folder / "records", rank)
    except Exception:  # noqa: BLE001 - NumPy may raise anything for a damaged file
        return True
    return record is not None and bool(record.ended)
