"""Runs a job to its end, restarting it as often as allowed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hvkeras.errors import MachineError
from hvkeras.launcher.elastic_run import ElasticLauncher
from hvkeras.launcher.host_pool import HostPool
from hvkeras.launcher.job import Job
from hvkeras.launcher.limits import require_open_files
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.run import Launcher
from hvkeras.launcher.traces import forget_traces, merged_after, trace_of
from hvkeras.report.after_run import forget_run, report_on_run, reports_to, write_outcome
from hvkeras.settings import Settings


def run(job: Job, printer: Callable[[bool, int], Printer]) -> int:
    """Runs a job to its end, restarting it as often as allowed.

    Args:
        job: What to run.
        printer: Makes the object that shows the ranks' output; called for each start, with whether it is a restart, and
            the number of ranks.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 plus the signal that ended the launcher.

    Raises:
        HvkerasError: The job could not be started.
    """
    settings = Settings(job.environment)
    folder, trace = reports_to(settings), trace_of(settings, job.folder)
    forget_traces(trace)
    resets, starts = 0, 0
    while True:
        require_open_files(job.size, len(job.hosts))
        shown = printer(starts > 0, job.size)
        code, launcher = asyncio.run(_run_once(job, shown, folder, job.reset_limit - resets))
        exit_report = launcher.exit_report
        resets, starts = resets + launcher.resets, starts + 1
        if not launcher.may_restart or resets >= job.reset_limit:
            break
        resets += 1
        if isinstance(launcher, ElasticLauncher):
            if job.ends_on_same_error and launcher.last_error and launcher.last_error == job.last_error:
                break
            job = replace(job, last_error=launcher.last_error)
        _say(shown, exit_report)
        if job.pool is not None:
            _say(shown, job.pool.note_failure(*launcher.failed_host))
            try:
                job = _placed_anew(job, job.pool, shown)
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
        _say(shown, f"hvkeras run: restarts all ranks, reset {resets} of at most {job.reset_limit}")
    _say(shown, "" if folder is None else report_on_run(folder),
         "" if trace is None else f"hvkeras run: {merged_after(trace)}", exit_report)
    return code


async def _run_once(job: Job, shown: Printer, folder: Path | None, resets: int) -> tuple[int, Launcher]:
    launcher = Launcher(job, shown) if job.pool is None else ElasticLauncher(job, shown, job.pool, resets)
    forget_run(folder)
    try:
        return await launcher.run(), launcher
    finally:
        write_outcome(folder, launcher.outcome)


def _placed_anew(job: Job, pool: HostPool, shown: Printer) -> Job:
    """Places the ranks of an elastic job on the hosts that there are now."""
    hosts = pool.restart(lambda text: _say(shown, text))
    placed = replace(job, hosts=hosts)
    if [(host.name, host.ranks) for host in hosts] != [(host.name, host.ranks) for host in job.hosts]:
        where = ", ".join(f"{len(host.ranks)} on {host.name}" for host in hosts)
        _say(shown, f"hvkeras run: {placed.size} rank{'s' * (placed.size > 1)} now ({where}), {job.size} before")
    return placed


def _say(shown: Printer, *texts: str) -> None:
    with contextlib.suppress(OSError, MachineError):
        for text in filter(None, texts):
            shown.say(text)
