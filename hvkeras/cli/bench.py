"""`hvkeras bench`: times engines in turns, each in a job of its own, on allreduces or training steps."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hvkeras.backends import backend_class, backend_names
from hvkeras.bench import report
from hvkeras.bench.figures import with_figures
from hvkeras.bench.interleaved import BLOCK, InterleavedRun, LaunchMethod
from hvkeras.bench.jobs import TimeIsUpError
from hvkeras.bench.models import MODELS, OPTIMIZERS
from hvkeras.bench.plan import Plan
from hvkeras.bench.plot import draw, require_matplotlib
from hvkeras.bench.rounds import Effort
from hvkeras.bench.row import PEER, Row
from hvkeras.comparison.command import exiting_on_signals
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host import machine
from hvkeras.host.cores import usable_cores
from hvkeras.launch_environments import Launch, Rendezvous
from hvkeras.launcher.check_build import find_command, version_of, why_not
from hvkeras.launcher.exit_report import root_cause
from hvkeras.launcher.run_arguments import Parser, seconds
from hvkeras.launcher.trial import end, hvkeras_run, timeout_message
from hvkeras.settings import Settings, size_in_bytes

PROG = "hvkeras bench"
KINDS = ("allreduce", "step")
SIZES = "4KiB,1MiB,4MiB,64MiB"
TIME = {"allreduce": 10.0, "step": 30.0}  # seconds for each size or model
TIMEOUT = 3600.0  # seconds that everything may take by default
WIDEST = 200  # columns that the table may have; it takes only what it needs, and is never truncated
_LAUNCHES = {"hvkeras": ("hvkeras run", "run"), "mpirun": ("mpirun (Open MPI)", "mpi")}

# Runs a rank of this installation; not with `-m`, which would search the current folder first.
_RANK = """import sys
sys.path[:] = filter(None, sys.path)
from pathlib import Path
from hvkeras.bench.worker import main
main(Path(sys.argv[1]))"""

_EPILOG = """Each engine has processes of its own, which are stopped while others are timed, and every result is
verified. The exit code is 0 if all backends that were asked for served, and were right.
Example: hvkeras bench allreduce -np 2 --launcher mpirun"""


def parser() -> argparse.ArgumentParser:
    """Builds the parser."""
    made = Parser(prog=PROG, description="Measures backends against each other, in alternation.", epilog=_EPILOG,
                  allow_abbrev=False)
    made.add_argument("kind", choices=KINDS, help="What is timed: chains of allreduces, or training steps.")
    made.add_argument("-np", "--np", "--num-proc", type=int, default=2, dest="np", metavar="N",
                      help="Number of processes on this machine, at least 2 (default: 2).")
    made.add_argument("--backends", metavar="NAME,...", help="Backends, in order. All that work here by default.")
    made.add_argument("--sizes", metavar="SIZE,...", help=f"Sizes of the allreduces (default: {SIZES}).")
    made.add_argument("--models", metavar="NAME,...", help=f"Models (default: {','.join(MODELS)}).")
    made.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="Optimizer of the steps (default:"
                      " sgd).")
    made.add_argument("--plain-update", action="store_true", help="Also times engines with the optimizer's update not"
                      " compiled.")
    made.add_argument("--time", type=seconds, metavar="SECONDS", help="Seconds for each size or model, warm-up not"
                      f" counted (default: {TIME['allreduce']:g} for allreduces, {TIME['step']:g} for steps).")
    made.add_argument("--rounds", type=int, metavar="N", help="Rounds for each size or model, instead of a time.")
    made.add_argument("--launcher", choices=tuple(_LAUNCHES), default="hvkeras", help="What starts the ranks; under"
                      " mpirun Horovod uses MPI, and MPI without TensorFlow is a row as well (default: hvkeras).")
    made.add_argument("--pin", action=argparse.BooleanOptionalAction, help="Whether each rank has one core of its own"
                      " (default: for steps, where there are enough cores).")
    made.add_argument("--peers", action="store_true", help="Also uses Horovod and tf.distribute without hvkeras.")
    made.add_argument("--jit", action="store_true", help="Also times steps that XLA compiles, where backends can.")
    made.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help="Seconds that everything may"
                      f" take (default: {TIMEOUT:g}).")
    made.add_argument("--json", metavar="FILE", help="Writes the times of all blocks, and facts of the machine.")
    made.add_argument("--plot", metavar="FILE.png", help="Draws a plot; needs matplotlib.")
    return made


def bench(arguments: Sequence[str]) -> int:
    """Runs `hvkeras bench`.

    Args:
        arguments: What follows it on the command line.

    Returns:
        The exit code: 0 if all backends worked and all results were right, else 1.

    Raises:
        UsageError: The command line is wrong.
        MachineError: No backend works here, something is not installed, or the job failed.
    """
    flags = parser().parse_args(list(arguments))
    cores = usable_cores()
    work = _checked(flags, cores)
    names = _backends(flags)
    facts = machine.facts(cores)
    folder = Path(tempfile.mkdtemp(prefix="hvkeras-bench-"))
    rows: list[Row] = []
    with exiting_on_signals():
        reason = _run(flags, names, work, folder, rows)
    _print(flags, rows, arguments)
    if flags.json:
        _write_json(flags, rows, arguments, facts, reason)
    if flags.plot:
        draw(flags.kind, rows, flags.np, _plot_title(flags, arguments, facts), Path(flags.plot))
    if reason:
        raise MachineError(f"{reason}; output of all ranks: {folder}")
    if not any(str(folder) in row.reason for row in rows):
        shutil.rmtree(folder, ignore_errors=True)
    return int(any(row.wrong or (row.reason and row.kind != PEER) for row in rows))


def _checked(flags: argparse.Namespace, cores: Sequence[int]) -> list[str]:
    """Checks the command line before anything starts, and returns what to measure: sizes or models."""
    Settings()  # an invalid variable is an error, too
    _check_flags(flags, cores)
    if flags.pin is None:
        flags.pin = len(cores) >= flags.np and flags.kind == "step"
    if flags.kind == "allreduce":
        sizes = _names(flags.sizes or SIZES, "--sizes", SIZES)
        for size in sizes:
            _require_size(size)
        return sizes
    models = _names(flags.models or ",".join(MODELS), "--models", ",".join(MODELS))
    for model in models:
        if model not in MODELS:
            raise UsageError(explain(f"A model is one of {', '.join(MODELS)}", model=model))
    return models


def _check_flags(flags: argparse.Namespace, cores: Sequence[int]) -> None:
    """Raises UsageError for flags that contradict each other, or have impossible values."""
    if flags.np < 2:
        raise UsageError(explain("At least two processes are needed to reduce anything", f"{PROG} {flags.kind} -np 2",
                                 np=flags.np))
    for name, kind in (("sizes", "allreduce"), ("models", "step"), ("jit", "step"), ("plain-update", "step")):
        if getattr(flags, name.replace("-", "_")) and flags.kind != kind:
            raise UsageError(explain(f"--{name} belongs to {PROG} {kind}", "leave it out", kind=flags.kind))
    if flags.rounds is not None and (flags.rounds < 1 or flags.time is not None):
        raise UsageError(explain("--rounds must be a positive number, and replaces --time", rounds=flags.rounds,
                                 time=flags.time))
    if flags.pin and len(cores) < flags.np:
        raise UsageError(explain("--pin needs a core for each process", "leave it out", np=flags.np, cores=len(cores)))
    for path in filter(None, (flags.json, flags.plot)):
        if not os.access(Path(path).absolute().parent, os.W_OK) or Path(path).is_dir():
            raise UsageError(explain("Files must be writable", "choose another one", file=path))
    if flags.plot:
        require_matplotlib()


def _names(text: str, flag: str, example: str) -> list[str]:
    """Splits a text at commas, and drops duplicates."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(explain(f"{flag} takes names separated by commas", f"{flag} {example}", received=text))
    return names


def _require_size(text: str) -> None:
    try:
        size = size_in_bytes(text)
    except ValueError as error:
        raise UsageError(explain(f"--sizes must be readable ({error})", f"--sizes {SIZES}", size=text)) from None
    if size < 4 or size % 4:
        raise UsageError(explain("Tensors are of float32, so a size is a multiple of 4 bytes", f"--sizes {SIZES}",
                                 size=text, bytes=size))


def _backends(flags: argparse.Namespace) -> list[str]:
    if flags.backends is not None:
        names = _names(flags.backends, "--backends", "horovod,tfdist")
        for name in names:
            backend_class(name)
        return names
    names = [name for name in backend_names() if not _objection(flags, name)]
    if not names:
        raise MachineError(explain(f"A backend must work here under {_LAUNCHES[flags.launcher][0]}",
                                   "see hvkeras run --check-build"))
    return names


def _objection(flags: argparse.Namespace, name: str) -> str:
    """Returns why a backend cannot be used, or ""."""
    title, kind = _LAUNCHES[flags.launcher]
    launch = Launch(title, 0, flags.np, Rendezvous(kind), mpi=flags.launcher == "mpirun")
    return why_not(name, launch, "")


def _command(flags: argparse.Namespace, ranks: int) -> list[str]:
    """Returns the command line that starts a job; the caller appends the job's folder."""
    rank = [sys.executable, "-c", _RANK]
    if flags.launcher == "hvkeras":
        return hvkeras_run(["-np", str(ranks), "--", *rank])
    mpirun = find_command("mpirun")
    if not mpirun or not version_of("mpi4py"):
        raise MachineError(explain("--launcher mpirun needs Open MPI and mpi4py", "pip install 'hvkeras[mpi]'"))
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *rank]


def _run(flags: argparse.Namespace, names: Sequence[str], work: Sequence[str], folder: Path, rows: list[Row]) -> str:
    """Runs everything under a progress bar, and adds rows as results arrive; returns why it ended early, or ""."""
    screen = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn(),
               TextColumn("{task.description}", markup=False))
    activity = "starting the ranks"
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(activity, total=1.0)

        def show(share: float, what: str) -> None:
            nonlocal activity
            activity = what
            progress.update(task, completed=share, description=what)

        mpi = flags.launcher == "mpirun"
        method = LaunchMethod(lambda ranks: _command(flags, ranks), lambda name: _objection(flags, name),
                              _last_line_of_hvkeras if mpi else root_cause, end, mpi)
        plan = Plan(flags.kind, "", flags.np, False, flags.jit, flags.optimizer, flags.plain_update, flags.pin,
                    flags.timeout, str(folder))
        effort = Effort(flags.time or TIME[flags.kind], flags.rounds, BLOCK[flags.kind])
        try:
            with contextlib.closing(InterleavedRun(plan, method, effort, show)) as interleaved_run:
                interleaved_run.run(names, flags.peers, work, rows)
        except TimeIsUpError:
            return f"{timeout_message(flags.timeout)}; the last activity: {activity}"
    return ""


def _last_line_of_hvkeras(text: str, code: int) -> str:
    """Returns why an mpirun job failed: the last message of hvkeras in its output."""
    lines = [line.removeprefix("hvkeras: ") for line in text.splitlines() if line.startswith("hvkeras: ")]
    return lines[-1] if lines else f"mpirun exited with code {code}"


def _print(flags: argparse.Namespace, rows: Sequence[Row], arguments: Sequence[str]) -> None:
    """Prints the table, an explanation of its columns, and the reasons for failures."""
    if not rows:
        return
    console = Console(highlight=False, soft_wrap=True, width=WIDEST)
    made, notes = report.table(flags.kind, rows, flags.np)
    placement = "each on a core of its own" if flags.pin else f"on {len(usable_cores())} cores"
    console.print(f"{PROG} {shlex.join(arguments)}: {flags.np} processes, {placement}", markup=False)
    console.print()
    console.print(made)
    console.print()
    for line in [*notes, *([""] if notes else []), *report.explanations(flags.kind, rows, flags.np)]:
        console.print(line, markup=False)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for row in rows:
        if row.wrong:
            errors.print(f"{PROG}: {row.name} is wrong: {row.reason}", markup=False)


def _plot_title(flags: argparse.Namespace, arguments: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Says what was measured, by which command, and on which machine."""
    files = {"--json", "--plot", flags.json, flags.plot}
    shown = shlex.join(argument for argument in arguments if argument not in files)
    return (f"{PROG} {shown}: {flags.np} processes on {len(facts['cores'])} cores ({facts['cpu']}), load"
            f" {facts['load_before'][0]:.1f} before and {os.getloadavg()[0]:.1f} after")


def _write_json(flags: argparse.Namespace, rows: Sequence[Row], arguments: Sequence[str],
                facts: Mapping[str, Any], reason: str) -> None:
    content = {
        "format": 1, "command": [*PROG.split(), *arguments], "kind": flags.kind, "ranks": flags.np,
        "launcher": flags.launcher, "pinned": flags.pin, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "failure": reason,
        "machine": dict(facts),
        "rows": with_figures(rows, flags.np),
    }
    Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")
