"""Runs a job to its end, restarting it as often as allowed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from hvkeras.errors import MachineError
from hvkeras.launcher.job import Job
from hvkeras.launcher.limits import require_open_files
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.run import Launcher
from hvkeras.launcher.traces import forget_traces, merged_after, trace_of
from hvkeras.report.after_run import forget_run, report_on_run, reports_to, write_outcome
from hvkeras.settings import Settings


def run(job: Job, printer: Callable[[bool], Printer]) -> int:
    """Runs a job to its end, restarting it as often as allowed.

    Args:
        job: What to run.
        printer: Makes the object that shows the ranks' output; called for each start, with whether it is a restart.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 plus the signal that ended the launcher.

    Raises:
        HvkerasError: The job could not be started.
    """
    settings = Settings(job.environment)
    require_open_files(job.size, len(job.hosts))
    folder, trace = reports_to(settings), trace_of(settings, job.folder)
    forget_traces(trace)

    async def run_once(shown: Printer) -> tuple[int, bool, str]:
        launcher = Launcher(job, shown)
        forget_run(folder)
        try:
            return await launcher.run(), launcher.may_restart, launcher.exit_report
        finally:
            write_outcome(folder, launcher.outcome)

    for start in range(job.reset_limit + 1):
        shown = printer(start > 0)
        code, may_restart, exit_report = asyncio.run(run_once(shown))
        if not may_restart or start == job.reset_limit:
            break
        _say(shown, exit_report, f"hvkeras run: restarts all ranks, reset {start + 1} of at most {job.reset_limit}")
    _say(shown, "" if folder is None else report_on_run(folder),
         "" if trace is None else f"hvkeras run: {merged_after(trace)}", exit_report)
    return code


def _say(shown: Printer, *texts: str) -> None:
    with contextlib.suppress(OSError, MachineError):
        for text in filter(None, texts):
            shown.say(text)
