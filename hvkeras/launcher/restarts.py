"""Run of a job with restarts after failures, and the merge of the ranks' traces at its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from hvkeras.diagnostics.final_report import remove_run, report_folder, report_on_run, write_outcome
from hvkeras.diagnostics.trace_files import merge, rank_files
from hvkeras.errors import HvkerasError, MachineError, UsageError, explain
from hvkeras.launcher.elastic_membership import ElasticMembership
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.launcher import Launcher
from hvkeras.launcher.limits import require_open_files
from hvkeras.launcher.membership import FixedMembership, Membership, Workers
from hvkeras.launcher.printer import Printer, files_kept_open
from hvkeras.settings import Settings


def trace_of(settings: Settings, folder: str) -> Path | None:
    """Return the path of a job's merged trace; None if the job is not traced.

    Raises:
        UsageError: The file's folder does not exist.
    """
    if settings.trace_steps is None:
        return None
    path = Path(folder, settings.trace_file)
    if not path.parent.is_dir():
        raise UsageError(explain("The trace's folder must exist", "create it", trace_file=str(path)))
    return path


def forget_traces(path: Path | None) -> None:
    """Remove the rank traces of an earlier job with the same trace file.

    Args:
        path: The path of the merged trace; None if the job is not traced.
    """
    for file in rank_files(path).values() if path is not None else ():
        file.unlink(missing_ok=True)


def merged_after(path: Path) -> str:
    """Merge the traces of a job's ranks; return a message about the result.

    Args:
        path: The path of the merged trace.
    """
    try:
        merged = merge(path)
    except HvkerasError as error:  # the job's exit code takes precedence
        return str(error)
    return merged.sentence() if merged is not None else f"no rank left a trace in {path.parent}"


def run(job: JobSpec, printer: Callable[[bool, int], Printer], keeps_output: bool = False) -> int:
    """Run a job to completion, and restart it as often as allowed.

    Args:
        job: The job.
        printer: Factory of the printer for the ranks' output. It is called for each start with two arguments: whether
            this is a restart, and the number of ranks.
        keeps_output: Whether the printer writes the output to files.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 plus the signal that ended the launcher.

    Raises:
        HvkerasError: The job could not be started.
    """
    settings = Settings(job.environment)
    folder, trace = report_folder(settings), trace_of(settings, job.folder)
    forget_traces(trace)
    resets, starts = 0, 0
    while True:
        local_ranks = sum(len(host.ranks) for host in job.hosts if host.local)
        require_open_files(job.size, len(job.hosts), local_ranks, files_kept_open(job.size) if keeps_output else 0,
                           job.tf_config)
        shown = printer(starts > 0, job.size)
        code, launcher = asyncio.run(_run_once(job, shown, folder, job.reset_limit - resets))
        resets, starts = resets + launcher.membership.resets, starts + 1
        if not launcher.may_restart or resets >= job.reset_limit:
            break
        resets += 1
        _say(shown, launcher.exit_report)
        try:
            job = launcher.membership.restarted(functools.partial(_say, shown))
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        _say(shown, f"hvkeras run: restarts all ranks, reset {resets} of at most {job.reset_limit}")
    _say(shown, "" if folder is None else report_on_run(folder),
         "" if trace is None else f"hvkeras run: {merged_after(trace)}", launcher.exit_report)
    return code


async def _run_once(job: JobSpec, shown: Printer, folder: Path | None, resets: int) -> tuple[int, Launcher]:
    secret = secrets.token_hex(32) if job.reporting is None else job.reporting.secret

    def membership(workers: Workers) -> Membership:
        return (FixedMembership(job, secret, workers) if job.pool is None
                else ElasticMembership(job, secret, job.pool, resets, workers))

    launcher = Launcher(job, shown, membership)
    remove_run(folder)
    try:
        return await launcher.run(), launcher
    finally:
        write_outcome(folder, launcher.outcome)


def _say(shown: Printer, *texts: str) -> None:
    with contextlib.suppress(OSError, MachineError):
        for text in filter(None, texts):
            shown.say(text)
