"""`hvkeras bench`: interleaved benchmarks of engines, each in its own job, on allreduces or training steps."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
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
from hvkeras.bench import tables
from hvkeras.bench.interleaved import BLOCK, InterleavedRun, LaunchMethod
from hvkeras.bench.jobs import BenchmarkTimeoutError
from hvkeras.bench.launches import LAUNCHERS, START, Starter, objection
from hvkeras.bench.models import MODELS, OPTIMIZERS
from hvkeras.bench.namespaces import VirtualNetwork, missing, network
from hvkeras.bench.participant import Effort
from hvkeras.bench.plan import AT, BenchmarkPlan, rate_of
from hvkeras.bench.row import PEER, BenchmarkRow, with_figures
from hvkeras.bench.tables import draw, require_matplotlib
from hvkeras.comparison.command import exiting_on_signals
from hvkeras.comparison.trial import end, timeout_message
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.machine import machine_facts, usable_cores
from hvkeras.launcher.exit_report import root_cause
from hvkeras.launcher.run_arguments import Parser, seconds
from hvkeras.launcher.shared_fork_server import SharedForkServer
from hvkeras.settings import COMPRESSIONS, Settings, size_in_bytes

PROG = "hvkeras bench"
KINDS = ("allreduce", "step")
SIZES = "4KiB,1MiB,4MiB,64MiB"
TIME = {"allreduce": 10.0, "step": 30.0}  # seconds for each size or model
TIMEOUT = 3600.0  # seconds for the whole benchmark
WIDEST = 200  # maximum columns of the table, which is not truncated
_PRELOADED = ("hvkeras", "tensorflow", "keras")  # modules that all ranks use
RATES = "1gbit"  # of the virtual hosts' links
BURSTS = {1e8: "16kb", 1e9: "128kb", 1e10: "512kb"}  # burst size, by maximum rate in bits per second

_EPILOG = """Each engine has its own processes, which are stopped while others are timed, and every result is
verified. The exit code is 0 if all requested backends worked, with correct results.
Example: hvkeras bench allreduce -np 2 --launcher mpirun"""


def parser() -> argparse.ArgumentParser:
    """Build the parser."""
    made = Parser(prog=PROG, description="Benchmark backends in interleaved blocks.", epilog=_EPILOG,
                  allow_abbrev=False)
    made.add_argument("kind", choices=KINDS, help="What to time: chains of allreduces, or training steps.")
    made.add_argument("-np", "--np", "--num-proc", type=int, dest="np", metavar="N",
                      help="Number of processes on this machine, at least 2 (default: 2, or one per host of --hosts).")
    made.add_argument("--backends", metavar="NAME,...", help="Backends, in order. All that work here by default.")
    made.add_argument("--sizes", metavar="SIZE,...", help=f"Sizes of the allreduces (default: {SIZES}).")
    made.add_argument("--models", metavar="NAME,...", help=f"Models (default: {','.join(MODELS)}).")
    made.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="Optimizer of the steps (default:"
                      " sgd).")
    made.add_argument("--plain-update", action="store_true", help="Also time engines without compiling the"
                      " optimizer's update.")
    made.add_argument("--compression", metavar="NAME,...", help="Also time engines with these compressions of"
                      " gradients: fp16, bf16, int8.")
    made.add_argument("--shard-update", action="store_true", help="Also time engines with a sharded"
                      " optimizer update.")
    made.add_argument("--time", type=seconds, metavar="SECONDS", help="Seconds for each size or model, without"
                      f" warm-up (default: {TIME['allreduce']:g} for allreduces, {TIME['step']:g} for steps).")
    made.add_argument("--rounds", type=int, metavar="N", help="Rounds for each size or model, instead of a time.")
    made.add_argument("--links", type=int, default=0, metavar="N", help="Allreduces in a chain (default: by size).")
    made.add_argument("--launcher", metavar="NAME", default="hvkeras", help=f"Launcher of the ranks: one of"
                      f" {', '.join(LAUNCHERS)}; under mpirun Horovod uses MPI, and MPI without TensorFlow is measured"
                      " as well. With --hosts, several launchers separated by commas (default: hvkeras).")
    made.add_argument("--hosts", type=int, default=1, metavar="N", help="Distribute the processes over N virtual"
                      " hosts, which are network namespaces of this machine; needs root.")
    made.add_argument("--rates", metavar="RATE,...", help="Bandwidths of the hosts' links, such as 100mbit,1gbit, or"
                      f" 'no limit' (default: {RATES}).")
    made.add_argument("--pin", action=argparse.BooleanOptionalAction, help="Whether to pin each rank to its own core"
                      " (default: for steps, if there are enough cores).")
    made.add_argument("--peers", action="store_true", help="Also measure Horovod and tf.distribute without hvkeras.")
    made.add_argument("--jit", action="store_true", help="Also time steps that XLA compiles, if supported.")
    made.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help="Seconds for the whole"
                      f" benchmark (default: {TIMEOUT:g}).")
    made.add_argument("--json", metavar="FILE", help="Write the times of all blocks, and facts about the machine.")
    made.add_argument("--plot", metavar="FILE.png", help="Draw a plot; needs matplotlib.")
    return made


def bench(arguments: Sequence[str]) -> int:
    """Run `hvkeras bench`.

    Args:
        arguments: Arguments of the command.

    Returns:
        Exit code: 0 if all backends worked and all results were correct, else 1.

    Raises:
        UsageError: The command line is invalid.
        MachineError: No backend works here, a package is missing, or the job failed.
    """
    flags = parser().parse_args(list(arguments))
    cores = usable_cores()
    work = _checked(flags, cores)
    names = _backends(flags)
    facts = machine_facts(cores)
    folder = Path(tempfile.mkdtemp(prefix="hvkeras-bench-"))
    rows: list[BenchmarkRow] = []
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
    """Check the command line, and return the sizes or models to measure."""
    Settings()  # raises for invalid environment variables
    _check_flags(flags, cores)
    if flags.pin is None:
        flags.pin = len(cores) >= flags.np and flags.kind == "step"
    if flags.kind == "allreduce":
        sizes = _names(flags.sizes or SIZES, "--sizes", SIZES)
        for size in sizes:
            _require_size(size)
        return _at_rates(sizes, flags.rates)
    models = _names(flags.models or ",".join(MODELS), "--models", ",".join(MODELS))
    for model in models:
        if model not in MODELS:
            raise UsageError(explain(f"--models must be among {', '.join(MODELS)}", model=model))
    return _at_rates(models, flags.rates)


def _at_rates(work: Sequence[str], rates: Sequence[str]) -> list[str]:
    return [f"{item}{AT}{rate}" for rate in rates for item in work] if rates else list(work)


def _check_flags(flags: argparse.Namespace, cores: Sequence[int]) -> None:
    """Raise UsageError for contradictory flags or invalid values."""
    if flags.np is None:
        flags.np = max(2, flags.hosts)
    if flags.np < 2:
        raise UsageError(explain("At least two processes are needed to reduce anything", f"{PROG} {flags.kind} -np 2",
                                 np=flags.np))
    _check_hosts(flags)
    for name, kind in (("sizes", "allreduce"), ("links", "allreduce"), ("models", "step"), ("jit", "step"),
                       ("plain-update", "step"), ("shard-update", "step"), ("compression", "step")):
        if getattr(flags, name.replace("-", "_")) and flags.kind != kind:
            raise UsageError(explain(f"--{name} belongs to {PROG} {kind}", "omit it", kind=flags.kind))
    flags.compressions = _compressions(flags.compression)
    if flags.rounds is not None and (flags.rounds < 1 or flags.time is not None):
        raise UsageError(explain("--rounds must be a positive number, and replaces --time", rounds=flags.rounds,
                                 time=flags.time))
    if flags.pin and len(cores) < flags.np:
        raise UsageError(explain("--pin needs a core for each process", "omit it", np=flags.np, cores=len(cores)))
    for path in filter(None, (flags.json, flags.plot)):
        if not os.access(Path(path).absolute().parent, os.W_OK) or Path(path).is_dir():
            raise UsageError(explain("Files must be writable", "choose another one", file=path))
    if flags.plot:
        require_matplotlib()


def _check_hosts(flags: argparse.Namespace) -> None:
    """Raise UsageError for incompatible launchers, hosts and bandwidths."""
    flags.launchers = _names(flags.launcher, "--launcher", "hvkeras,mpirun")
    for launcher in flags.launchers:
        if launcher not in LAUNCHERS or (launcher == "tf_config" and flags.hosts == 1):
            names = [name for name in LAUNCHERS if flags.hosts > 1 or name != "tf_config"]
            raise UsageError(explain(f"--launcher must be one of {', '.join(names)}", launcher=launcher))
    if flags.hosts == 1:
        if flags.rates or len(flags.launchers) > 1:
            raise UsageError(explain("Bandwidths and several launchers need virtual hosts",
                                     f"{PROG} {flags.kind} --hosts 2", rates=flags.rates, launcher=flags.launcher))
        flags.rates = []
        return
    if flags.hosts < 1 or flags.np % flags.hosts:
        raise UsageError(explain("Each host must have the same number of processes", f"-np {2 * max(1, flags.hosts)}",
                                 np=flags.np, hosts=flags.hosts))
    flags.rates = _names(flags.rates or RATES, "--rates", "100mbit,1gbit")
    for rate in flags.rates:
        try:
            rate_of(f"{AT}{rate}")
        except ValueError as error:
            raise UsageError(explain(f"--rates must be readable ({error})", f"--rates {RATES}", rate=rate)) from None
    if reason := missing():
        raise MachineError(explain(f"--hosts creates network namespaces: {reason}", "run it as root"))


def _compressions(text: str | None) -> list[str]:
    names = _names(text, "--compression", "int8") if text else []
    for name in names:
        if name not in COMPRESSIONS[1:]:
            raise UsageError(explain(f"--compression must be among {', '.join(COMPRESSIONS[1:])}", compression=name))
    return names


def _names(text: str, flag: str, example: str) -> list[str]:
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
        raise UsageError(explain("Sizes must be multiples of 4 bytes, since tensors are of float32", f"--sizes {SIZES}",
                                 size=text, bytes=size))


def _backends(flags: argparse.Namespace) -> list[str]:
    if flags.backends is not None:
        names = _names(flags.backends, "--backends", "horovod,tfdist")
        for name in names:
            backend_class(name)
        return names
    several = flags.hosts > 1
    names = [name for name in backend_names()
             if any(not objection(launcher, name, flags.np, several) for launcher in flags.launchers)]
    if not names:
        raise MachineError(explain(f"A backend must work here under {LAUNCHERS[flags.launchers[0]][0]}",
                                   "see hvkeras run --check-build"))
    return names


def _run(flags: argparse.Namespace, names: Sequence[str], work: Sequence[str], folder: Path,
         rows: list[BenchmarkRow]) -> str:
    """Run the benchmark with a progress bar, and append to `rows`; return why it failed, or ""."""
    screen = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn(),
               TextColumn("{task.description}", markup=False))
    activity = "starting the ranks"
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(activity, total=1.0)

        def show(share: float, description: str) -> None:
            nonlocal activity
            activity = description
            progress.update(task, completed=share, description=description)

        effort = Effort(flags.time or TIME[flags.kind], flags.rounds, BLOCK[flags.kind])
        stages = [list(stage) for _, stage in itertools.groupby(work, rate_of)]
        deadline = time.monotonic() + flags.timeout
        hosts = network(flags.hosts) if flags.hosts > 1 else contextlib.nullcontext()
        try:
            with hosts as made, contextlib.closing(_fork_server()) as server:
                methods = _methods(flags, folder, made, server)
                # Engines measure the network when they start, so each bandwidth has its own jobs.
                for number, stage in enumerate(stages):
                    def show_stage(share: float, description: str, number: int = number) -> None:
                        show((number + share) / len(stages), description)

                    if made is not None:
                        _limit(made, stage[0])
                    shared = folder / str(number)
                    shared.mkdir()
                    plan = BenchmarkPlan(
                        flags.kind, "", flags.np, False, flags.jit, flags.optimizer, flags.plain_update, flags.pin,
                        max(1.0, deadline - time.monotonic()), str(shared), flags.links, flags.shard_update,
                        tuple(flags.compressions))
                    with contextlib.closing(InterleavedRun(plan, methods, effort, show_stage, flags.hosts)) as run:
                        run.run(names, flags.peers, stage, rows)
        except BenchmarkTimeoutError:
            return f"{timeout_message(flags.timeout)}; the last activity: {activity}"
    return ""


def _fork_server() -> SharedForkServer:
    """Return the fork server of all jobs, which run the same program."""
    return SharedForkServer([sys.executable], _PRELOADED, {**os.environ, **START}, ())


def _methods(flags: argparse.Namespace, folder: Path, hosts: VirtualNetwork | None, server: SharedForkServer
             ) -> list[LaunchMethod]:
    methods = []
    for launcher in flags.launchers:
        starter = Starter(launcher, folder, hosts, flags.np // flags.hosts, lambda: server.stand_in)
        methods.append(LaunchMethod(
            f", {starter.title}" if len(flags.launchers) > 1 else "", starter.command,
            functools.partial(objection, launcher, ranks=flags.np, several_hosts=flags.hosts > 1),
            root_cause if launcher == "hvkeras" else _last_line_of_hvkeras, end, launcher == "mpirun",
            starter.environment(), hosts is not None))
    return methods


def _limit(hosts: VirtualNetwork, work: str) -> None:
    """Limit the bandwidth of new hosts, or of hosts with another limit, to that of a piece of work."""
    rate = rate_of(work)
    if math.isinf(rate):
        with contextlib.suppress(MachineError):  # there is no limit yet
            hosts.limit("", "")
    else:
        burst = next((burst for most, burst in BURSTS.items() if rate * 8 <= most), "1mb")
        hosts.limit(work.partition(AT)[2], burst)


def _last_line_of_hvkeras(text: str, code: int) -> str:
    """Return the failure of a job that another launcher started: the last message of hvkeras in its output."""
    lines = [line.removeprefix("hvkeras: ") for line in text.splitlines() if line.startswith("hvkeras: ")]
    return lines[-1] if lines else f"it exited with code {code}"


def _print(flags: argparse.Namespace, rows: Sequence[BenchmarkRow], arguments: Sequence[str]) -> None:
    if not rows:
        return
    console = Console(highlight=False, soft_wrap=True, width=WIDEST)
    made, notes = tables.table(flags.kind, rows, flags.np)
    placement = "each on its own core" if flags.pin else f"on {len(usable_cores())} cores"
    hosts = f" on {flags.hosts} hosts" if flags.hosts > 1 else ""
    console.print(f"{PROG} {shlex.join(arguments)}: {flags.np} processes{hosts}, {placement}", markup=False)
    console.print()
    console.print(made)
    console.print()
    for line in [*notes, *([""] if notes else []), *tables.explanations(flags.kind, rows, flags.np)]:
        console.print(line, markup=False)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for row in rows:
        if row.wrong:
            errors.print(f"{PROG}: {row.name} is wrong: {row.reason}", markup=False)


def _plot_title(flags: argparse.Namespace, arguments: Sequence[str], facts: Mapping[str, Any]) -> str:
    files = {"--json", "--plot", flags.json, flags.plot}
    shown = shlex.join(argument for argument in arguments if argument not in files)
    return (f"{PROG} {shown}: {flags.np} processes on {len(facts['cores'])} cores ({facts['cpu']}), load"
            f" {facts['load_before'][0]:.1f} before and {os.getloadavg()[0]:.1f} after")


def _write_json(flags: argparse.Namespace, rows: Sequence[BenchmarkRow], arguments: Sequence[str],
                facts: Mapping[str, Any], reason: str) -> None:
    content = {
        "format": 1, "command": [*PROG.split(), *arguments], "kind": flags.kind, "ranks": flags.np,
        "hosts": flags.hosts, "launcher": flags.launcher, "pinned": flags.pin,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "failure": reason, "machine": dict(facts),
        "rows": with_figures(rows, flags.np),
    }
    Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")
