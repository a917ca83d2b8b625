"""The command `hvkeras run`."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hvkeras.backends import require_backend_name
from hvkeras.cli.errors import guarded
from hvkeras.control.launch_environments import Launch
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.global_batch import rank_process
from hvkeras.horovod import as_horovod
from hvkeras.host.console import prints_at
from hvkeras.host.files import remove_commits
from hvkeras.host.private_folders import remove_abandoned
from hvkeras.host.ssh import Ssh
from hvkeras.launcher import host_reporter
from hvkeras.launcher.horovod_flags import tuning_variables
from hvkeras.launcher.host_pool import FAILURES, HostPool, discovered
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.limits import note_oversubscription
from hvkeras.launcher.placement import THIS_HOST, HostRanks, allocated_hosts, place_ranks, slots_in
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.launcher.restarts import run as run_job
from hvkeras.launcher.run_arguments import ELASTIC_RESETS, ELASTIC_TIMEOUT, parse
from hvkeras.settings import Settings

# A top-level module that a line of Python imports.
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
_STRATEGY = "MultiWorkerMirroredStrategy"
# Calls by which the ranks of a script of the strategy find each other without --tf-config.
_FINDS_OTHERS = re.compile(r"\b(init|initialize|strategy)\(|environ.*TF_CONFIG|cluster_resolver")
# The folder of commits, and whether `hvkeras run` removes them.
_FOLDER, _REMOVES = "HVKERAS_ELASTIC_DIR", "HVKERAS_RUN_COMMITS"


def run(arguments: Sequence[str], prog: str = "hvkeras run") -> int:
    """Run `hvkeras run`.

    Args:
        arguments: Arguments of the command.
        prog: Name of the command in help and errors.

    Returns:
        Exit code: that of the rank that failed first, 2 for an invalid command line.
    """
    return guarded(prog, lambda: _run(arguments, prog))


def _run(arguments: Sequence[str], prog: str) -> int:
    flags = parse(arguments, prog)
    flags.prog = prog
    if flags.check_build:
        from hvkeras.diagnostics.check_build import check_build  # noqa: PLC0415 - imports Rich, which only this flag needs

        return check_build()
    is_elastic = flags.min_np is not None or flags.max_np is not None
    _require_data_parallel(flags, is_elastic or flags.host_discovery_script is not None)
    pod = host_reporter.pod(os.environ) if is_elastic and not (flags.hosts or flags.hostfile) else None
    if pod is not None:
        return _run_in_pod(flags, pod)
    allocated = None if flags.hosts or flags.hostfile else allocated_hosts(os.environ, flags.np)
    flags.by_srun = allocated is not None
    pool = pool_of(flags, allocated or flags.hosts)
    flags.counts_changes = flags.reset_limit is not None
    if flags.reset_limit is None:
        flags.reset_limit = 0 if pool is None else ELASTIC_RESETS
    hosts = place_ranks(flags.np, allocated or flags.hosts, flags.hostfile) if pool is None else pool.hosts(
        flags.np or flags.min_np, lambda text: print(text, file=sys.stderr, flush=True))
    with _commits_folder(flags.reset_limit, hosts) as commits:
        code = _run_with(flags, hosts, {**_environment(flags), **commits}, pool)
        if not code and _REMOVES in commits:
            remove_commits(Path(commits[_FOLDER]))
        return code


def _run_in_pod(flags: argparse.Namespace, pod: Launch) -> int:
    """Run an elastic job in the pods of an Indexed Job: the first pod launches it, and the others report to it."""
    slots = flags.slots_per_host or 1
    if pod.rank:
        return host_reporter.report_from_pod(pod, slots)
    flags.by_srun = False
    flags.min_np = flags.min_np or 1
    flags.max_np = flags.max_np or max(flags.min_np, flags.np or 0, pod.size * slots)
    flags.blacklist_cooldown_range = flags.blacklist_cooldown_range or host_reporter.COOL_DOWN
    reporting = host_reporter.hosts_of_pods(pod)
    code = 1
    try:
        pool = pool_of(flags, None, host_reporter.slots_of(reporting, slots))
        assert pool is not None
        flags.counts_changes = flags.reset_limit is not None
        if flags.reset_limit is None:
            flags.reset_limit = ELASTIC_RESETS
        hosts = pool.hosts(flags.np or flags.min_np, lambda text: print(text, file=sys.stderr, flush=True))
        with _commits_folder(flags.reset_limit, hosts) as commits:
            code = _run_with(flags, hosts, {**_environment(flags), **commits}, pool, reporting)
            if not code and _REMOVES in commits:
                remove_commits(Path(commits[_FOLDER]))
    finally:
        reporting.finish(code)
    return code


def pool_of(flags: argparse.Namespace, hosts: str | None,
            reported: Callable[[], dict[str, int]] | None = None) -> HostPool | None:
    """Return the host pool of an elastic job; None for other jobs.

    Args:
        hosts: Hosts and slots, in the format of -H.
        reported: Returns the slots of hosts that report to this one, and replaces all other sources of hosts.

    Raises:
        UsageError: The flags contradict each other.
    """
    script, least, most = flags.host_discovery_script, flags.min_np, flags.max_np
    if script is None and least is None and most is None:
        elastic = next((name for name in ("slots_per_host", "elastic_timeout", "blacklist_cooldown_range",
                                          "failures_per_host")
                        if getattr(flags, name) is not None), "")
        if elastic:
            raise UsageError(explain(f"--{elastic.replace('_', '-')} is for elastic jobs", "add --min-np or"
                                     " --host-discovery-script", **{elastic: getattr(flags, elastic)}))
        return None
    limits_given = {"np": flags.np, "min_np": least, "max_np": most}
    given = {name: value for name, value in limits_given.items() if value is not None}
    limits = [value for value in (least, flags.np, most) if value is not None]
    if limits != sorted(limits) or limits[0] < 1:
        raise UsageError(explain("1 <= --min-np <= -np <= --max-np must hold", "-np 4 --min-np 2 --max-np 8", **given))
    if script is not None and (hosts or flags.hostfile):
        raise UsageError(explain("Hosts must come from one source",
                                 "omit either --host-discovery-script, or -H and"
                                 " -hostfile", host_discovery_script=script, hosts=hosts, hostfile=flags.hostfile))
    if flags.np is None and least is None and not hosts and not flags.hostfile:
        raise UsageError(explain("The number of processes must be given", "-np 4 --min-np 2", **given))
    if reported is not None:
        find = reported
    elif script is not None:
        find = functools.partial(discovered, script, flags.slots_per_host or 1)
    elif hosts or flags.hostfile:
        find = functools.partial(slots_in, hosts, flags.hostfile)
        flags.np = flags.np or sum(find().values())
    else:
        find = functools.partial(dict, {THIS_HOST: most or flags.np or least})
    range_ = flags.blacklist_cooldown_range
    if range_ is not None and range_[0] > range_[1]:
        raise UsageError(explain("The shortest cool-down must not exceed the longest", "--blacklist-cooldown-range 30"
                                 " 600", blacklist_cooldown_range=range_))
    return HostPool(find, least or flags.np, most, flags.elastic_timeout or ELASTIC_TIMEOUT,
                    None if range_ is None else (range_[0], range_[1]),
                    changes=script is not None or reported is not None,
                    failures=flags.failures_per_host or (1 if flags.as_horovod else FAILURES))


def _run_with(flags: argparse.Namespace, hosts: Sequence[HostRanks], environment: Mapping[str, str],
              pool: HostPool | None, reporting: ReportingHosts | None = None) -> int:
    settings = Settings(environment)
    _require_startable(flags, settings, hosts, environment)
    if prints_at(settings, "WARNING"):
        note_oversubscription(sum(len(host.ranks) for host in hosts if host.local),
                              functools.partial(print, file=sys.stderr, flush=True))
    folder = Path(flags.output_filename).absolute() if flags.output_filename else None
    live = sys.stdout.isatty()
    command, prepare = flags.command, None
    has_several_ranks = sum(len(host.ranks) for host in hosts) > 1
    if flags.data_parallel and (has_several_ranks or rank_process.is_recorded(settings)):
        command = rank_process.wrapped(command, not flags.no_private_folders)
        environment = {**environment, **({rank_process.SWITCH: "on"} if has_several_ranks else {})}
        if settings.preload:
            prepare = {"name": "hvkeras.global_batch.rank_process:prepare",
                       "private_folders": not flags.no_private_folders}
            environment = rank_process.with_hash_seed(environment) if has_several_ranks else environment
    job = JobSpec(
        command=command,
        hosts=hosts,
        folder=os.getcwd(),
        environment=environment,
        ssh=Ssh(flags.ssh_port, flags.ssh_identity_file, settings.start_timeout, flags.by_srun),
        verbose=flags.verbose,
        terminal=_terminal_for_rank_0(flags) if live else None,
        reset_limit=flags.reset_limit,
        counts_changes=flags.counts_changes,
        pool=pool,
        reporting=reporting,
        tf_config=flags.tf_config,
        forked=flags.command,
        prepare=prepare,
    )

    def printer(append: bool, size: int) -> Printer:
        try:
            return Printer(size, sys.stdout.buffer, sys.stderr.buffer, live, flags.prefix_output_with_timestamp,
                           quiet=not prints_at(settings, "INFO"), folder=folder, append=append,
                           as_one=flags.data_parallel, reports_failures=not prints_at(settings, "DEBUG"))
        except OSError as error:
            raise UsageError(explain(f"The folder for the ranks' output must be writable ({error.strerror})",
                                     "choose another one", output_filename=flags.output_filename)) from None

    try:
        return run_job(job, printer, keeps_output=folder is not None)
    finally:
        if flags.data_parallel:
            remove_abandoned()


def _require_startable(flags: argparse.Namespace, settings: Settings, hosts: Sequence[HostRanks],
                       environment: Mapping[str, str]) -> None:
    """Raise the errors of a job that can be seen before it starts."""
    if (chosen := environment.get("KERAS_BACKEND", "").strip().lower()) not in ("", "tensorflow"):
        raise UnsupportedError(explain("Keras must run on TensorFlow", "set KERAS_BACKEND=tensorflow",
                                       keras_backend=chosen))
    if flags.trace_file and settings.trace_steps is None:
        raise UsageError(explain("--trace-file needs --trace-steps", "--trace-steps 100:120",
                                 trace_file=flags.trace_file))
    if all(host.local for host in hosts):  # else backend and script may exist there alone
        require_backend_name(settings.backend)
        _check_script(flags.command, flags)


def _check_script(command: Sequence[str], flags: argparse.Namespace) -> None:
    """Check the Python script that a command runs, and say what its strategy needs.

    Raises:
        UsageError: There is no such file, or it needs Horovod.
    """
    words = itertools.takewhile(lambda word: word.endswith(".py") or word in ("-u", "-O", "-B"), command[1:])
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    if script is None or not Path(command[0]).name.startswith("python"):
        return
    if not script.exists():
        others = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
        near = difflib.get_close_matches(script.name, others, n=1)
        raise UsageError(explain("The script must exist", f"did you mean {near[0]}" if near else
                                 "check its name and the current folder", script=str(script), folder=os.getcwd()))
    text = script.read_text(errors="replace") if script.is_file() else ""
    imported = set(_IMPORT.findall(text))
    if flags.as_horovod or flags.data_parallel:
        return
    if _STRATEGY in text:
        _advise_on_strategy(script, text, imported, flags)
    as_horovod_line = f"{flags.prog} --as-horovod ... python {shlex.quote(str(script))}"
    if "horovod" in imported and "hvkeras" not in imported:
        raise UsageError(explain("Horovod does not work under hvkeras run, which can run its scripts with hvkeras in"
                                 " its place", f"add --as-horovod: {as_horovod_line}", script=str(script),
                                 imports="horovod"))
    if "horovod" in imported and _needs_horovod(script, text):
        raise UsageError(explain("A script must import hvkeras alone, as Horovod is not installed here", "replace"
                                 f" horovod by hvkeras in all its imports, or add --as-horovod: {as_horovod_line}",
                                 script=str(script), imports="horovod"))


def _advise_on_strategy(script: Path, text: str, imported: Collection[str], flags: argparse.Namespace) -> None:
    """Print what a script of `MultiWorkerMirroredStrategy` lacks: hvkeras, or TF_CONFIG."""
    is_alone = not flags.tf_config and "TF_CONFIG" not in os.environ and flags.np != 1
    said = ""
    if "hvkeras" not in imported:
        start = "" if flags.tf_config else f", and start it with {flags.prog} --tf-config"
        said = f"{_STRATEGY} fails in fit of Keras 3.\nHINT: add import hvkeras to {script}, which repairs it{start}"
    elif f"{_STRATEGY}(" in text and is_alone and not _FINDS_OTHERS.search(text):
        said = (f"without TF_CONFIG, each {_STRATEGY} has one worker, and trains alone.\nHINT: start {script} with"
                f" {flags.prog} --tf-config")
    if said:
        print(f"{flags.prog}: {said}", file=sys.stderr, flush=True)


def _needs_horovod(script: Path, text: str) -> bool:
    """Return whether a script imports Horovod at its top level, and no Horovod is installed."""
    if "as_horovod" in text or importlib.util.find_spec("horovod") or (
            PathFinder.find_spec("horovod", [str(script.parent)])):
        return False
    with contextlib.suppress(SyntaxError, ValueError):
        for line in ast.parse(text).body:
            names = [alias.name for alias in line.names] if isinstance(line, ast.Import) else (
                [line.module or ""] if isinstance(line, ast.ImportFrom) and not line.level else [])
            if any(name.partition(".")[0] == "horovod" for name in names):
                return True
    return False


@contextlib.contextmanager
def _commits_folder(reset_limit: int, hosts: Sequence[HostRanks]) -> Iterator[dict[str, str]]:
    """Create a folder for the commits of a job that may be restarted, unless the user has chosen one.

    Raises:
        UsageError: Rank 0 is on another host, where the folder would not be removed.
    """
    chosen = os.environ.get(_FOLDER)
    if chosen:  # absolute, so that restarts use the same one if the script changes folders
        yield {_FOLDER: os.path.abspath(chosen), **({_REMOVES: "on"} if hosts[0].local else {})}
    elif not reset_limit:
        yield {}
    elif not hosts[0].local:
        raise UsageError(explain("Jobs whose rank 0 is on another host need a folder there for commits",
                                 "set HVKERAS_ELASTIC_DIR", host=hosts[0].name, reset_limit=reset_limit))
    else:
        with tempfile.TemporaryDirectory(prefix="hvkeras-commits-") as folder:
            yield {_FOLDER: folder, _REMOVES: "on"}


def _environment(flags: argparse.Namespace) -> dict[str, str]:
    """Return this process's environment, updated by the flags that correspond to settings."""
    chosen = {
        "HVKERAS_BACKEND": flags.backend,
        "HVKERAS_START_TIMEOUT": flags.start_timeout,
        "HVKERAS_NETWORK_INTERFACES": ",".join(flags.network_interfaces or ()) or None,
        "HVKERAS_PRELOAD": flags.preload,
        "HVKERAS_TIMELINE": flags.timeline_filename,
        "HVKERAS_REPORT": _report_folder(flags.report),
        "HVKERAS_TRACE_STEPS": flags.trace_steps,
        "HVKERAS_TRACE_FILE": flags.trace_file,
        "HVKERAS_BUCKET_SIZE": None if flags.fusion_threshold_mb is None else f"{flags.fusion_threshold_mb}MiB",
        "HVKERAS_LOG_LEVEL": flags.log_level,
        "HVKERAS_STALL_WARNING": 0 if flags.no_stall_check else flags.stall_check_warning_time_seconds,
        "HVKERAS_STALL_SHUTDOWN": 0 if flags.no_stall_check else flags.stall_check_shutdown_time_seconds,
        **tuning_variables(flags),
    }
    environ = as_horovod.environment(os.environ) if flags.as_horovod else os.environ
    return {**environ, **{name: str(value) for name, value in chosen.items() if value is not None}}


def _report_folder(named: str | None) -> str | None:
    # As an absolute path, since ranks may change folders.
    chosen = named or os.environ.get("HVKERAS_REPORT")
    return os.path.abspath(chosen) if chosen else None


def _terminal_for_rank_0(flags: argparse.Namespace) -> tuple[int, int]:
    # The size of our terminal, minus the width of the prefix.
    columns, rows = shutil.get_terminal_size()
    prefix = "2000-01-01 00:00:00 " * flags.prefix_output_with_timestamp + "[0] " * (not flags.data_parallel)
    return max(20, columns - len(prefix)), rows


def _require_data_parallel(flags: argparse.Namespace, is_elastic: bool) -> None:
    """Raise UsageError if --data-parallel is combined with another way to train on several ranks."""
    if not flags.data_parallel:
        if flags.no_private_folders:
            raise UsageError(explain("--no-private-folders needs --data-parallel", "leave it out"))
        return
    if flags.as_horovod or flags.tf_config:
        raise UsageError(explain("--data-parallel is for scripts that are written for one process",
                                 "leave out either --data-parallel or the other flag",
                                 other="--as-horovod" if flags.as_horovod else "--tf-config"))
    if is_elastic:
        raise UsageError(explain("The ranks of a job with --data-parallel are fixed", "use -np without --min-np,"
                                 " --max-np and --host-discovery-script; --reset-limit restarts all ranks"))
