"""`hvkeras compare`: compare a script on each backend and on one process, in a table and a report."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from hvkeras.backends import backend_class, backend_names
from hvkeras.backends.capabilities import CompressesBetweenHosts
from hvkeras.comparison import report, results_file
from hvkeras.comparison.result import COMPRESSED, ONE_PROCESS, SHARED, backend_of
from hvkeras.comparison.rows import Comparison, rows_of
from hvkeras.comparison.runs import Job, Runs, trials_of
from hvkeras.comparison.table import IDLE, explanations, scaling_table, table
from hvkeras.comparison.trial import ProgressDisplay, Trial
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.diagnostics.charts import missing
from hvkeras.diagnostics.check_build import why_not
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.console import in_notebook
from hvkeras.host.machine import busy_share, fair_share, machine_facts, operation_threads, usable_cores
from hvkeras.launcher.placement import HostRanks, place_ranks
from hvkeras.launcher.run_arguments import Parser, flags_and_command, require_command, seconds
from hvkeras.settings import Settings

PROG = "hvkeras compare"
TIMEOUT = 3600.0  # default time limit of a run, in seconds
READABLE = 100  # columns of the summary
WIDEST = 200  # maximum width of the table in columns; it is never truncated

_EPILOG = """The script runs unchanged, and must leave the choice of the backend to hvkeras. The exit code is 0 if all
backends that were asked for ran. Example: hvkeras compare -np 2 --repeat 3 python examples/train.py --epochs 3"""


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = Parser(prog=PROG, description="Run a training script on each backend and on one process, compare speed and"
                    " results, and write a report.", epilog=_EPILOG, allow_abbrev=False,
                    usage=f"{PROG} -np N[,N...] [--backends NAME,...] [options] command ...")
    parser.add_argument("-np", "--num-proc", type=sizes, dest="np", default=(), metavar="N[,N...]", help="Number of"
                        " processes, at least 2; several (1,2,4) give a scaling curve, the table shows the largest.")
    parser.add_argument("--backends", metavar="NAME,...", help="Backends, in order; the final weights are compared"
                        " with those of the first one. By default, all that work here.")
    parser.add_argument("--data-parallel", action="store_true", help="Compare a Keras script for one process: several"
                        " ranks share the work of each batch, one process trains as without hvkeras.")
    parser.add_argument("--shard-update", type=switches, default=(), metavar="on,off", help="Run backends with a"
                        " sharded update of the optimizer, without, or both; by default, as the script specifies.")
    parser.add_argument("--compression", type=compressions, default=(), metavar="NAME,...", help="Run backends with"
                        " each of these compressions of gradients: none, fp16, bf16, int8 (between hosts, native only);"
                        " by default, as the script specifies.")
    parser.add_argument("--baseline", action=argparse.BooleanOptionalAction, default=True, help="Run on one process"
                        " as well, for the scaling efficiency (default: yes).")
    parser.add_argument("--preload", action=argparse.BooleanOptionalAction, default=True, help="Import TensorFlow and"
                        " Keras once, and fork the ranks of all runs on this host from there (default: yes).")
    parser.add_argument("--repeat", type=repeats, default=1, metavar="N", help="Number of runs of each job (default:"
                        " 1), in rounds: every backend, then one process, and again.")
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help="Timeout of each run in"
                        f" seconds (default: {TIMEOUT:g}).")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, and the number of slots on each;"
                        " with --out on a folder that they share.")
    parser.add_argument("--out", metavar="FOLDER", help="Folder for the report, its charts, results.json and the"
                        " output of all ranks; by default, a new temporary folder.")
    parser.add_argument("--verbose", action="store_true", help="Show the output of all ranks as well.")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(trial=Trial)  # class of a run
    return parser


def sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of processes, such as `2` or `1,2,4`."""
    found = tuple(sorted({int(number) for number in text.split(",")}))
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"a number of processes must be positive, not {found[0]}")
    return found


def switches(text: str) -> tuple[bool, ...]:
    """Parse `on`, `off` or both."""
    known = {"on": True, "off": False}
    if not text or any(word not in known for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"it is on, off or on,off, not {text}")
    return tuple(dict.fromkeys(known[word] for word in text.split(",")))


def compressions(text: str) -> tuple[str, ...]:
    """Parse names of compressions, such as `none,int8`."""
    names = tuple(dict.fromkeys(text.split(",")))
    if any(name not in COMPRESSED for name in names):
        raise argparse.ArgumentTypeError(f"they are {', '.join(COMPRESSED)}, not {text}")
    return names


def repeats(text: str) -> int:
    """Parse the number of runs of each job."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a job runs at least once, not {value} times")
    return value


def compare(arguments: Sequence[str]) -> int:
    """Run `hvkeras compare`.

    Args:
        arguments: The arguments after `hvkeras compare`.

    Returns:
        The exit code: 0 if all backends ran, else 1.

    Raises:
        UsageError: The command line is wrong.
        MachineError: No backend works here.
    """
    flags = flags_and_command(parser(), arguments)
    require_command(flags, PROG)
    if flags.after_command:
        raise UsageError(explain(f"Flags of {PROG} must come before the command, and the command's own after it",
                                 f"write them before {flags.command[0]}, or put -- before it if the command should get"
                                 " them",
                                 after_the_command=" ".join(flags.after_command)))
    display = ProgressDisplay()
    if not flags.data_parallel and (script := _without_hvkeras(flags.command)):
        display.say(f"{PROG}: {script} names neither hvkeras nor horovod. Unless a module that it imports calls"
                    " hvd.init(), the comparison will stop after the first run. HINT: compare a Keras script for one"
                    " process with --data-parallel")
    comparison = comparison_of(flags, display, shlex.join(flags.command))
    print_table(comparison, Console(highlight=False, soft_wrap=True, width=WIDEST))
    print(f"output of all ranks: {comparison.folder}")
    _print_error_tails(comparison, Console(stderr=True, highlight=False, soft_wrap=True))
    return int(comparison.failed)


def comparison_of(flags: argparse.Namespace, display: ProgressDisplay, title: str) -> Comparison:
    """Run a comparison, and write its report.

    Args:
        flags: The parsed command line, with the ranks' `command`.
        display: Display of the progress.
        title: Title of the report: the command or the function.

    Raises:
        UsageError: A flag is wrong.
        MachineError: No backend works here.
    """
    if not flags.np or flags.np[-1] < 2:
        raise UsageError(explain("At least two processes are needed for a comparison with one", f"{PROG} -np 2 python"
                                 " train.py",
                                 np=",".join(map(str, flags.np)) or None))
    if flags.np[0] == 1 and not flags.baseline:
        raise UsageError(explain("1 in -np is the baseline", "leave out one of -np 1 and --no-baseline",
                                 np=",".join(map(str, flags.np))))
    several = tuple(size for size in flags.np if size > 1)
    hosts = {size: place_ranks(size, flags.hosts, None) for size in several}
    Settings()  # reports an invalid variable before anything starts
    names = _backends(flags, hosts[several[-1]])
    if flags.shard_update:
        names = [name + SHARED * is_shared for name in names for is_shared in flags.shard_update]
    if flags.compression:
        names = [name + COMPRESSED[compression] for name in names for compression in flags.compression
                 if compression != "int8" or issubclass(backend_class(backend_of(name)), CompressesBetweenHosts)]
    problems = {(name, size): _problem(backend_of(name), size, hosts[size]) for size in several for name in names}
    folder = _folder(flags.out)
    # A script for one process uses all cores, also on one process.
    cores, environment = ("", {}) if flags.data_parallel else _cores_of_one(hosts[several[-1]])
    jobs: list[Job] = [*problems, *([(ONE_PROCESS, 1)] if flags.baseline else [])]
    fewer = {job: environment for job in jobs if job[1] < several[-1]}
    trials = trials_of(jobs, flags, folder, fewer)
    began, machine = time.time(), {**machine_facts(usable_cores()), "busy_before": busy_share(usable_cores())}
    if machine["busy_before"] >= IDLE and display.console.is_terminal and not in_notebook():
        display.say(f"{PROG}: other processes use {machine['busy_before']:.0%} of the cores: end them, or times will"
                    " vary")
    with exiting_on_signals():
        results = Runs(trials, problems, flags, display).results()
    comparison = Comparison(title, several, flags.repeat, rows_of(results), cores, folder, began, time.time() - began,
                            machine, flags.data_parallel)
    results_file.write(comparison, folder)
    report.write(comparison, folder)
    return comparison


def _without_hvkeras(command: Sequence[str]) -> str:
    """Return the Python script of a command if its text names neither hvkeras nor Horovod, else ""."""
    script = next((word for word in command if word.endswith(".py")), "")
    try:
        text = Path(script).read_text(errors="replace") if script else "hvkeras"
    except OSError:
        return ""
    return "" if "hvkeras" in text or "horovod" in text else script


def _backends(flags: argparse.Namespace, hosts: Sequence[HostRanks]) -> list[str]:
    if flags.backends is not None:
        names = list(dict.fromkeys(filter(None, (name.strip() for name in flags.backends.split(",")))))
        for name in names:
            backend_class(name)
        if not names:
            raise UsageError(explain("--backends takes names separated by commas", "--backends horovod,tfdist",
                                     backends=flags.backends))
        return names
    names = [name for name in backend_names() if not _problem(name, flags.np[-1], hosts)]
    if not names:
        raise MachineError(explain("A backend must work here under hvkeras run", "see hvkeras run --check-build"))
    return names


def _problem(name: str, processes: int, hosts: Sequence[HostRanks]) -> str:
    """Return why a backend cannot run this job, as far as this host can determine; "" if it can."""
    here = next((host for host in hosts if host.local), None)
    if here is None:
        return ""
    return why_not(name, Launch("hvkeras run", 0, processes, Rendezvous("run"), local_size=len(here.ranks)), "")


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
    """Limit the processes of smaller jobs to as many threads as those of the largest job, for a fair comparison.

    Returns:
        A description of the cores of one process, and the environment variables of this limit.
    """
    cores, first = usable_cores(), hosts[0]
    share = fair_share(cores, [cores] * len(first.ranks))
    if not first.local or not Settings().threads or share == len(cores) or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return "", {}
    operations = operation_threads(share, len(cores))
    threads = {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": str(operations)}
    return f"on {share} of {len(cores)} cores, as each rank", {**threads, **os.environ}


@contextlib.contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, as Ctrl-C raises KeyboardInterrupt, so that no job is left running."""
    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_table(made: Comparison, console: Console) -> None:
    """Print the table, the summary, causes of failures, the meaning of the columns, and where the report is."""
    shown, notes = table(made)
    console.print(f"{made.command}, on {made.processes} processes", markup=False)
    console.print()
    console.print(shown)
    console.print()
    if len(made.sizes) > 1:
        console.print(scaling_table(made))
        console.print()
    for line in report.summary(made):
        console.print(line, markup=False, soft_wrap=False, width=READABLE)
        console.print()
    for line in [*notes, *([""] if notes else []), *explanations(made), *filter(None, [missing()])]:
        console.print(line, markup=False)
    console.print(f"report: {made.folder / report.NAME}", markup=False)


def _print_error_tails(comparison: Comparison, console: Console) -> None:
    for row in comparison.rows:
        for run in row.runs:
            if run.error_tail:
                console.print(f"\nthe standard error of {run.name} ends with", markup=False)
                console.print(run.error_tail, markup=False)
