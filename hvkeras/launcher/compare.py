"""`hvkeras compare`: the same script once on each backend and once on one process, in one table."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from hvkeras.backends import backend_class, backend_names
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.launch_environments import Launch, Rendezvous
from hvkeras.launcher.arguments import Parser, flags_and_command, require_command, seconds
from hvkeras.launcher.check_build import verdict
from hvkeras.launcher.comparison import ONE_PROCESS, Result, result, weight_difference
from hvkeras.launcher.comparison_table import explanations, reference_of, table
from hvkeras.launcher.placement import HostRanks, place
from hvkeras.launcher.trial import Trial
from hvkeras.launcher.verdict import TAIL_LINES
from hvkeras.record import WEIGHTS, Record
from hvkeras.settings import Settings
from hvkeras.threads import fair_share, operation_threads, usable_cores

PROG = "hvkeras compare"
TIMEOUT = 3600.0  # seconds that a run may take by default
WIDEST = 200  # columns that the table may have; it takes what it needs, and is never cut

_EPILOG = """The script runs unchanged, and must leave the choice of the backend to hvkeras. The exit code is 0 if all
backends that were asked for ran. Example: hvkeras compare -np 2 python examples/train.py --epochs 3"""


def parser() -> argparse.ArgumentParser:
    """Builds the parser."""
    made = Parser(prog=PROG, description="Runs a training script once on each backend and once on one process, and"
                  " prints how fast each was and whether they agree.", epilog=_EPILOG, allow_abbrev=False,
                  usage=f"{PROG} -np N [--backends NAME,...] [options] command ...")
    made.add_argument("-np", "--num-proc", type=int, dest="np", metavar="N", help="Number of processes, 2 at least.")
    made.add_argument("--backends", metavar="NAME,...", help="Backends, in order; the final weights are compared"
                      " with those of the first one. All that work here by default.")
    made.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help="Seconds that each run may"
                      f" take (default: {TIMEOUT:g}).")
    made.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and how many processes each may have; with"
                      " --out on a folder that they share.")
    made.add_argument("--out", metavar="FOLDER", help="Keeps the output of all ranks there; by default in a new folder"
                      " for temporary files.")
    made.add_argument("--verbose", action="store_true", help="Shows the output of all ranks as well.")
    made.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def compare(arguments: Sequence[str]) -> int:
    """Runs `hvkeras compare`.

    Args:
        arguments: What follows it on the command line.

    Returns:
        The exit code: 0 if all backends ran, else 1.

    Raises:
        UsageError: The command line is wrong.
        MachineError: No backend works here.
    """
    flags = flags_and_command(parser(), arguments)
    require_command(flags, PROG)
    if flags.np is None or flags.np < 2:
        raise UsageError(explain("Two processes at least are compared with one", f"{PROG} -np 2 python train.py",
                                 np=flags.np))
    hosts = place(flags.np, flags.hosts, None)
    Settings()  # a wrong variable is found before anything starts
    problems = {name: _problem(name, flags.np, hosts) for name in _backends(flags, hosts)}
    folder = _folder(flags.out)
    cores, environment = _cores_of_one(hosts)
    trials = [_trial(flags, name, flags.np, folder, os.environ) for name in problems]
    trials.append(_trial(flags, ONE_PROCESS, 1, folder, {**os.environ, **environment}))
    with ended_by_signals():
        try:
            results = _results(trials, problems, flags)
        finally:
            for trial in trials:
                (trial.records / WEIGHTS).unlink(missing_ok=True)  # as large as the model
    _print(results, trials, flags, folder, cores)
    return int(any(each.reason for each in results if each.name != ONE_PROCESS))


def _backends(flags: argparse.Namespace, hosts: Sequence[HostRanks]) -> list[str]:
    """The backends to compare."""
    if flags.backends is not None:
        names = list(dict.fromkeys(filter(None, (name.strip() for name in flags.backends.split(",")))))
        for name in names:
            backend_class(name)
        if not names:
            raise UsageError(explain("--backends takes names separated by commas", "--backends horovod,tfdist",
                                     backends=flags.backends))
        return names
    names = [name for name in backend_names() if not _problem(name, flags.np, hosts)]
    if not names:
        raise MachineError(explain("A backend must work here under hvkeras run", "see hvkeras run --check-build"))
    return names


def _problem(name: str, processes: int, hosts: Sequence[HostRanks]) -> str:
    """Why a backend cannot serve this job, as far as this host can tell; "" if it can."""
    if not any(host.local for host in hosts):
        return ""
    return verdict(backend_class(name), Launch("hvkeras run", 0, processes, Rendezvous("run")), "")


def _folder(out: str | None) -> Path:
    if out is None:
        return Path(tempfile.mkdtemp(prefix="hvkeras-compare-"))
    folder = Path(out).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(explain(f"The folder for the ranks' output must be writable ({error.strerror})",
                                 "choose another one", out=out)) from None
    return folder


def _cores_of_one(hosts: Sequence[HostRanks]) -> tuple[str, dict[str, str]]:
    """Gives one process as many threads as a rank of the job has, so that cores are not counted as speed.

    Returns:
        What one process computes with, in words, and the variables that see to it.
    """
    cores, first = usable_cores(), hosts[0]
    share = fair_share(cores, [cores] * len(first.ranks))
    if not first.local or not Settings().threads or share == len(cores) or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return "", {}
    operations = operation_threads(share, len(cores))
    threads = {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": str(operations)}
    return f"on {share} of {len(cores)} cores, as each rank", {**threads, **os.environ}


def _trial(flags: argparse.Namespace, name: str, processes: int, folder: Path,
           environment: Mapping[str, str]) -> Trial:
    output = folder / name.replace(" ", "-")
    arguments = ["-np", str(processes), "--backend", "local" if name == ONE_PROCESS else name,
                 "--output-filename", str(output)]
    arguments += ["-H", flags.hosts] if flags.hosts else []
    trial = Trial(name, processes, output, [*arguments, "--", *flags.command], environment)
    return replace(trial, environment={**environment, "HVKERAS_RECORD": str(trial.records)})


def _results(trials: Sequence[Trial], problems: Mapping[str, str], flags: argparse.Namespace) -> list[Result]:
    """Runs all jobs, one after the other."""
    screen = Console(stderr=True, highlight=False)
    results: list[Result] = []
    for number, trial in enumerate(trials, start=1):
        heading = f"[{number}/{len(trials)}] {trial.name}"
        not_here = problems.get(trial.name, "")
        problem = not_here or trial.run(flags.timeout, heading, screen, flags.verbose)
        if problem:
            results.append(Result(trial.name, trial.processes, problem, has_last_words=not not_here))
            continue
        records = [Record.read(trial.records, rank) for rank in range(trial.processes)]
        first = next((each for each in trials if each.name == reference_of(results)), None)
        difference = None
        if first is not None and trial.name != ONE_PROCESS:
            difference = weight_difference(first.records, trial.records)
        results.append(result(trial.name, trial.processes, records, trial.printed(), difference))
    return results


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind, as Ctrl-C does, so that no job is left behind."""
    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(results: Sequence[Result], trials: Sequence[Trial], flags: argparse.Namespace, folder: Path,
           cores: str) -> None:
    """Prints the table, what its columns are, the reasons of failures, and where the output is."""
    console = Console(highlight=False, soft_wrap=True, width=WIDEST)
    made, notes = table(results, flags.np)
    console.print(f"{shlex.join(flags.command)}, on {flags.np} processes", markup=False)
    console.print()
    console.print(made)
    console.print()
    for line in [*notes, *([""] if notes else []), *explanations(results, flags.np, cores)]:
        console.print(line, markup=False)
    console.print(f"output of all ranks: {folder}", markup=False)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for trial, each in zip(trials, results, strict=True):
        tail = trial.text("stderr").splitlines()[-TAIL_LINES:] if each.has_last_words else []
        if tail:
            errors.print(f"\nthe standard error of {trial.name} ends with", markup=False)
            errors.print("\n".join(tail), markup=False)
