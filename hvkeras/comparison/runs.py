"""Runs of a comparison: their list, their order, and their results."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvkeras.comparison.result import (
    ONE_PROCESS,
    SHARED,
    Result,
    backend_of,
    compression_of,
    needs_for_record,
    result,
    weight_difference,
)
from hvkeras.comparison.trial import ProgressDisplay, Trial
from hvkeras.diagnostics.record import WEIGHTS, Record
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.launcher.exit_report import TAIL_LINES
from hvkeras.launcher.job_spec import start_variables
from hvkeras.launcher.preload import preload_of
from hvkeras.launcher.shared_fork_server import SharedForkServer
from hvkeras.settings import Settings

MODULES = "tensorflow,keras"  # that the ranks of all runs share, unless HVKERAS_PRELOAD names others
Job = tuple[str, int]  # a backend, or ONE_PROCESS, and its number of processes


def trials_of(jobs: Sequence[Job], flags: argparse.Namespace, folder: Path,
              environments: Mapping[Job, Mapping[str, str]]) -> list[Trial]:
    """Return all runs in order: each round runs every job once.

    Args:
        jobs: The jobs in order.
        environments: Additional environment variables of each job.
    """
    return [_trial(job, number, flags, folder, environments.get(job, {}))
            for number in range(1, flags.repeat + 1) for job in jobs]


def _trial(job: Job, number: int, flags: argparse.Namespace, folder: Path, environment: Mapping[str, str]) -> Trial:
    name, processes = job
    parts = [name.replace(", ", "-").replace(" ", "-")]
    parts += [f"np-{processes}"] if _has_several_sizes(flags) and name != ONE_PROCESS else []
    parts += [f"run-{number}"] if flags.repeat > 1 else []
    output = folder.joinpath(*parts)
    arguments = ["-np", str(processes), "--backend", backend_of(name), "--output-filename", str(output)]
    arguments += ["-H", flags.hosts] if flags.hosts else []
    arguments += ["--data-parallel"] if flags.data_parallel else []
    trial: Trial = flags.trial(name, processes, output, [*arguments, "--", *flags.command], {}, number)
    shares = {"HVKERAS_SHARD_UPDATE": str(int(name.endswith(SHARED)))} if flags.shard_update else {}
    if flags.compression:
        shares["HVKERAS_COMPRESSION"] = compression_of(name)
    seed = {"PYTHONHASHSEED": _common_seed()} if flags.data_parallel else {}
    return replace(trial, environment={**os.environ, **environment, **shares, **seed,
                                       "HVKERAS_RECORD": str(trial.records)})


def _common_seed() -> str:
    """Return the seed of scripts for one process that set none, so that all jobs train on the same random numbers."""
    chosen = os.environ.get("PYTHONHASHSEED", "")
    return chosen if chosen.isdecimal() else "0"


def _has_several_sizes(flags: argparse.Namespace) -> bool:
    return len({size for size in flags.np if size > 1}) > 1


def _fork_server(flags: argparse.Namespace) -> SharedForkServer | None:
    """Return a fork server for all runs; None if they are not forked."""
    if not flags.preload or flags.hosts or flags.data_parallel or flags.trial is not Trial:
        return None
    environment = start_variables(os.environ)
    settings = Settings({**environment, "HVKERAS_PRELOAD": environment.get("HVKERAS_PRELOAD") or MODULES})
    preload, _ = preload_of(flags.command, settings, os.getcwd())
    if not preload:
        return None
    return SharedForkServer(preload["python"], settings.preload, environment, preload["request"]["command"])


class Runs:
    """Sequential run of all trials.

    Args:
        trials: The trials, in order.
        problems: Why each job cannot run here, or "".
        display: Display of the progress.
    """

    def __init__(self, trials: Sequence[Trial], problems: Mapping[Job, str], flags: argparse.Namespace,
                 display: ProgressDisplay) -> None:
        self._trials, self._problems, self._flags, self._display = trials, problems, flags, display
        self._server: SharedForkServer | None = None
        self._starts_new_processes = not flags.preload  # whatever HVKERAS_PRELOAD says
        self._seconds: dict[Job, float] = {}
        self._failed: set[Job] = set()
        self._has_record = False
        self._references: dict[int, Path] = {}  # by number of processes: the records of the first backend that ran

    def results(self) -> list[Result]:
        """Run all trials, and return their results. A job that has failed is not run again.

        Raises:
            UsageError: The first run that ended well left no record, so the script does not train with hvkeras.
        """
        found = []
        self._server = _fork_server(self._flags)
        try:
            for number, trial in enumerate(self._trials):
                if (trial.name, trial.processes) not in self._failed:
                    found.append(self._result(number, trial))
                    self._remove_weights(trial)
        finally:
            self._close_server()
            for trial in self._trials:
                (trial.records / WEIGHTS).unlink(missing_ok=True)
        return found

    def _result(self, number: int, trial: Trial) -> Result:
        job = trial.name, trial.processes
        unavailable = self._problems.get(job, "")
        begun = time.monotonic()
        problem = unavailable or self._run(number, trial)
        seconds = time.monotonic() - begun
        if problem:
            error_tail = "" if unavailable else "\n".join(trial.text("stderr").splitlines()[-TAIL_LINES:])
            found = Result(*job, problem, error_tail=error_tail)
        else:
            self._seconds[job] = seconds
            records = [Record.read(trial.records, rank) for rank in range(trial.processes)]
            self._require_record(records[0])
            found = result(*job, records, trial.printed(), self._difference(trial), self._flags.data_parallel)
        if found.reason:
            self._failed.add(job)
        elif trial.name != ONE_PROCESS:
            self._references.setdefault(trial.processes, trial.records)
        return replace(found, round=trial.round, seconds=None if unavailable else seconds)

    def _require_record(self, record: Record | None) -> None:
        """Stop after the first run without a record: the others would train just as long, and leave none either."""
        self._has_record = self._has_record or record is not None
        if self._has_record:
            return
        needed = needs_for_record(self._flags.data_parallel)
        hint = ("start the Python script that trains as the command" if self._flags.data_parallel else
                "add import hvkeras as hvd, hvd.init() and hvd.DistributedOptimizer around its optimizer, or"
                " --data-parallel if it is a Keras script for one process")
        raise UsageError(explain(f"{needed[0].upper()}{needed[1:]}: rank 0 of the first run left no record", hint))

    def _run(self, number: int, trial: Trial) -> str:
        """Run a trial, forked if possible; return why it failed, or ""."""
        forked, flags = trial, trial.arguments[:-len(self._flags.command)]
        if self._server is not None:
            try:
                command = [*self._server.stand_in, *self._server.command]
                forked = replace(trial, arguments=["--no-preload", *flags, *command])
            except MachineError as error:
                self._display.say(f"hvkeras compare: starts each rank as a new Python process: {error}")
                self._close_server()
        if self._server is None and self._starts_new_processes:
            forked = replace(trial, arguments=["--no-preload", *trial.arguments])
        problem = forked.run(self._flags.timeout, self._heading(number, trial), self._display, self._flags.verbose,
                             self._estimate(number))
        if problem and self._server is not None and "PreloadError" in trial.text("stderr"):
            self._display.say("hvkeras compare: starts each rank as a new Python process, since the script sets a"
                              f" variable that its imports read: {problem.partition(' HINT: ')[0]}")
            self._close_server()
            return self._run(number, trial)
        return problem

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server, self._starts_new_processes = None, True

    def _difference(self, trial: Trial) -> float | str | None:
        first = self._references.get(trial.processes)
        return None if first is None or trial.name == ONE_PROCESS else weight_difference(first, trial.records)

    def _remove_weights(self, trial: Trial) -> None:
        """Remove weights that are no longer needed, as they are as large as the model."""
        if trial.records not in self._references.values():
            (trial.records / WEIGHTS).unlink(missing_ok=True)

    def _heading(self, number: int, trial: Trial) -> str:
        heading = f"[{number + 1}/{len(self._trials)}] {trial.name}"
        if _has_several_sizes(self._flags) and trial.name != ONE_PROCESS:
            heading += f" on {trial.processes}"
        return heading + (f", round {trial.round} of {self._flags.repeat}" if self._flags.repeat > 1 else "")

    def _estimate(self, number: int) -> float | None:
        """Estimate the seconds of the remaining runs from earlier ones; None before the first."""
        if not self._seconds:
            return None
        mean = sum(self._seconds.values()) / len(self._seconds)
        left = [(trial.name, trial.processes) for trial in self._trials[number:]]
        return sum(self._seconds.get(job, mean) for job in left if job not in self._failed
                   and not self._problems.get(job))
