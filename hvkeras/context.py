"""The job this process takes part in: `init()` builds it, `shutdown()` leaves it."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvkeras.autograph import leave_as_it_is
from hvkeras.backends import BUILT_IN, backend_class, backend_names
from hvkeras.backends.interface import Backend, Start
from hvkeras.control.cause import Cause
from hvkeras.control.client import ControlClient
from hvkeras.control.ending import Ending
from hvkeras.errors import MachineError, NotInitializedError, UnsupportedError, UsageError, explain
from hvkeras.failure import FailureHooks
from hvkeras.launch_environments import Launch, describe_cluster, detect_launch
from hvkeras.launch_environments.starter import open_starter
from hvkeras.mpi import finalize_mpi
from hvkeras.network import host_identity
from hvkeras.output import open_closed_streams, prints_at, quiet_engines, say
from hvkeras.rendezvous import REPORT_EVERY, Meeting, forget_note, meet, task_name
from hvkeras.requirements import require_tensorflow
from hvkeras.settings import Settings, ignored_variables
from hvkeras.threads import fair_share, limit_threads, usable_cores
from hvkeras.topology import Topology, topology_from_hosts

if TYPE_CHECKING:
    from hvkeras.agreement import EntryCounts


@dataclass(frozen=True)
class Job:
    """What every part of hvkeras needs to know of the running job.

    Attributes:
        launch: How this process was launched.
        settings: The settings in force.
        topology: Ranks and hosts.
        backend: The engine, started.
        entries: The counts of entered collectives.
        control: The control channel; None for a single process.
        hooks: What ends the job when a rank fails; None for a single process.
    """

    launch: Launch
    settings: Settings
    topology: Topology
    backend: Backend
    entries: EntryCounts
    control: ControlClient | None
    hooks: FailureHooks | None


_job: Job | None = None
STRATEGY_BACKEND = "tfdist"  # whose cluster strategies that span ranks are built on


class _Process:
    """What outlives `shutdown()`: the channel, the counts, and engines that cannot start twice."""

    meeting: Meeting | None = None
    launch: Launch | None = None
    hooks: FailureHooks | None = None
    entries: EntryCounts | None = None
    ending: Ending | None = None
    engines: dict[str, Backend] = {}  # noqa: RUF012 - one per process on purpose
    sessions = 0


def current() -> Job:
    """Returns the running job.

    Raises:
        NotInitializedError: `init()` has not been called, or `shutdown()` has.
    """
    if _job is None:
        raise NotInitializedError(explain("hvkeras must be initialised first", "call hvd.init() before this"))
    return _job


def is_initialized() -> bool:
    """Says whether `init()` has been called and `shutdown()` has not."""
    return _job is not None


def init(backend: Any = None, process_sets: Any = None, comm: Any = None) -> None:
    """Joins the job that launched this process, and starts its collective engine.

    All ranks meet on a small control channel first, so that a missing or misconfigured rank is
    named before any engine can hang. Rank 0 prints one line: backend, engine, size and launcher.
    Calling it again registers the process sets that are new, and does nothing else.

    Example:
        import hvkeras as hvd
        hvd.init()                    # or hvd.init("tfdist")
        print(hvd.rank(), hvd.size())

    Args:
        backend: The engine: `auto`, one of the built-in `native`, `horovod`, `tfdist`, `local`, or a plug-in's name.
            By default the variable HVKERAS_BACKEND decides, then what works here.
        process_sets: `ProcessSet`s to register on all ranks; "dynamic" is accepted and needs nothing.
        comm: Horovod's parameter for a communicator or a list of ranks; only None is supported.

    Raises:
        UsageError: The backend does not exist or cannot serve this launch, or the launcher's
            variables cannot be read.
        MachineError: A package, port or launcher is not what the job needs.
        PeerError: A rank is missing or failed.
    """
    global _job  # noqa: PLW0603 - a process takes part in one job
    if backend is not None and not isinstance(backend, str):
        backend, comm = None, backend
    if comm is not None:
        raise UnsupportedError(explain("Jobs must span all launched ranks", "leave comm out, and use process_set= for"
                                       " a subset of the ranks", comm=comm))
    if _job is not None:
        if backend not in (None, "auto", _job.backend.name):
            raise UsageError(explain("init() must be called with one backend", "call hvd.shutdown() in between",
                                     running=_job.backend.name, backend=backend))
        _add_process_sets(process_sets)
        return
    open_closed_streams()
    require_tensorflow()
    settings = Settings()
    quiet_engines(settings.log_level)
    requested = backend or settings.backend
    if requested != "auto":
        backend_class(requested)
    launch = detect_launch()
    _job = _join(launch, settings, requested) if launch.size > 1 else _alone(launch, settings, requested)
    _start_companions(_job, process_sets)


def init_for_strategy() -> Backend:
    """Joins the job as `init()` does, if that has not been called, and has TensorFlow's collectives run on all ranks.

    A job that has another engine keeps it, and gets TensorFlow's beside it. Where `init()` was not called, a rank that
    has its host to itself keeps all GPUs.

    Returns:
        The engine of TensorFlow's collectives; that of a single process where there is but one.

    Raises:
        HvkerasError: As `init()` does, or TensorFlow was used before.
    """
    global _job  # noqa: PLW0603 - a process takes part in one job
    if _job is None:
        open_closed_streams()
        settings = Settings()
        quiet_engines(settings.log_level)
        launch = detect_launch()
        _job = (_join(launch, settings, STRATEGY_BACKEND, keeps_gpus=True) if launch.size > 1
                else _alone(launch, settings, settings.backend))
        _start_companions(_job, None)
    job = _job
    if job.topology.size == 1 or job.backend.name == STRATEGY_BACKEND or job.control is None or job.hooks is None:
        return job.backend
    engine = _Process.engines.setdefault(STRATEGY_BACKEND, backend_class(STRATEGY_BACKEND)())
    if engine not in job.hooks.backends:
        engine.start(Start(job.topology, job.control, job.launch, job.settings))
        job.hooks.backends.append(engine)
        job.hooks.renew_signals()
    return engine


def _start_companions(job: Job, process_sets: Any) -> None:
    """Starts what stands around a job: the record, what `fit` does on several ranks, the timeline, and process sets."""
    if job.control is not None:
        from hvkeras import company, mismatch

        job.control.on_company = company.hear
        job.control.on_refusal = mismatch.refuse
    ignored = ignored_variables(job.backend.name)
    if ignored and job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
        say("ignored: " + "; ".join(f"{name} ({why})" for name, why in ignored.items()))
    records = bool(job.settings.record or job.settings.report or job.settings.trace_steps)
    if records:
        from hvkeras import recording

        recording.start(job)
    if job.launch.size > 1 or records:
        from hvkeras import fit

        fit.install()
    if job.settings.timeline:
        from hvkeras.timeline import start_timeline

        start_timeline(job.settings.timeline)
    _add_process_sets(process_sets)


def _add_process_sets(process_sets: Any) -> None:
    """Registers the process sets that are not registered yet."""
    if not process_sets or isinstance(process_sets, str):  # Horovod's "dynamic" needs nothing here
        return
    from hvkeras.process_sets import add_process_set, registered_process_sets

    for process_set in process_sets:
        if not any(process_set is known for known in registered_process_sets().values()):
            add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job in good order; `init()` may be called again on all ranks."""
    global _job
    if _job is None:
        return
    from hvkeras import compat, recording, timeline
    from hvkeras.process_sets import forget_process_sets

    recording.finish()
    timeline.stop_timeline()
    compat.unhook_all()
    forget_process_sets()
    job, _job = _job, None
    job.backend.stop()
    if job.hooks is not None:
        job.hooks.uninstall()
        job.hooks.backends = []
    if job.control is not None:
        job.control.leave()


def init_without_engine() -> Job:
    """Joins a job of several ranks as `init()` does, but starts no engine.

    `hvkeras bench` measures MPI by itself so, and training without communication.

    Returns:
        The job, whose backend communicates nothing.

    Raises:
        UsageError: The launcher's variables cannot be read.
        MachineError: A port or launcher is not what the job needs.
        PeerError: A rank is missing or failed.
    """
    global _job  # noqa: PLW0603 - a process takes part in one job
    settings = Settings()
    quiet_engines(settings.log_level)
    _job = _join(detect_launch(), settings, "local", placeholder=backend_class("local")())
    return _job


def _entries() -> EntryCounts:
    from hvkeras.agreement import EntryCounts

    if _Process.entries is None:
        _Process.entries = EntryCounts()
    return _Process.entries


def _alone(launch: Launch, settings: Settings, requested: str) -> Job:
    """Builds a job of one process: the local backend, unless another was asked for."""
    # A plug-in may have its own idea of one process.
    name = "local" if requested == "auto" or requested in BUILT_IN else requested
    topology = topology_from_hosts(0, [socket.gethostname()])
    engine = backend_class(name)()
    engine.start(Start(topology, None, launch, settings))
    if prints_at(settings, "WARNING"):
        asked = f" ({requested} was asked for; one process needs no engine)" if requested not in ("auto", name) else ""
        say(f"backend {engine.name} ({engine.engine}), 1 rank, launched by {launch.launcher}{asked}")
    return Job(launch, settings, topology, engine, _entries(), None, None)


def _join(launch: Launch, settings: Settings, requested: str, placeholder: Backend | None = None,
          keeps_gpus: bool = False) -> Job:
    """Builds a job of several ranks: meet, agree, start the engine, and prove that it counts the same.

    A placeholder stands for engines that the caller will start; for `keeps_gpus` see `Start`.
    """
    meeting, hooks = _meeting(launch, settings)
    client = meeting.client
    hooks.install()
    try:
        entries = _entries()
        client.join(entries)
        _Process.sessions += 1
        facts = _exchange(client, launch, settings, _own_facts(requested, launch))
        forget_note(launch, settings)
        meeting.release_port()
        topology = topology_from_hosts(launch.rank, [fact["host"] for fact in facts],
                                       [fact["identity"] for fact in facts], [fact["cores"] for fact in facts])
        _check_local_ranks(launch, topology)
        _share_cores(settings, facts, topology)
        if placeholder is not None:
            return Job(launch, settings, topology, placeholder, entries, client, hooks)
        name = _agree_on_backend(launch, facts)
        engine = _Process.engines.setdefault(name, backend_class(name)())
        hooks.backends = [engine]
        counted = engine.start(Start(topology, client, launch, settings, keeps_gpus))
        hooks.renew_signals()
        _check_size(launch, engine, counted)
        client.gather(f"started {_Process.sessions}", counted, settings.start_timeout)
    except BaseException as error:
        hooks.report(error)
        raise
    if topology.rank == 0 and prints_at(settings, "WARNING"):
        hosts = len({fact["identity"] for fact in facts})
        say(f"backend {engine.name} ({engine.engine}), {topology.size} ranks on {hosts} host{'s' * (hosts > 1)},"
            f" launched by {launch.launcher}")
    return Job(launch, settings, topology, engine, entries, client, hooks)


def _meeting(launch: Launch, settings: Settings) -> tuple[Meeting, FailureHooks]:
    """Connects to the control channel, which is done once a process."""
    if _Process.meeting is not None and _Process.hooks is not None:
        if launch != _Process.launch:
            raise UsageError(explain("init() must find the launch environment of its first call",
                                     "do not change the launcher's variables between init() calls",
                                     first=_Process.launch, now=launch))
        return _Process.meeting, _Process.hooks
    if launch.rank == 0 and launch.cluster and prints_at(settings, "WARNING"):
        say(describe_cluster(launch))

    def on_end(cause: Cause) -> None:
        if _Process.hooks is not None:
            _Process.hooks.job_ended(cause)

    meeting = meet(launch, settings, on_end)
    meeting.client.watch_over(settings.stall_warning, settings.stall_shutdown)
    if launch.rendezvous.kind != "run" and (starter := open_starter()) is not None:
        meeting.client.watch_starter(starter)
    _Process.ending = Ending(f"rank {launch.rank} on {socket.gethostname()} (pid {os.getpid()})",
                             settings.stall_warning, settings.stall_shutdown, settings.liveness_timeout)
    meeting.client.watch_ending(_Process.ending)
    hooks = FailureHooks(meeting.client, socket.gethostname(), settings.exit_grace, prints_at(settings, "DEBUG")
                         and settings.log_level in ("DEBUG", "TRACE"))
    _Process.meeting, _Process.hooks, _Process.launch = meeting, hooks, launch
    if meeting.client.cause is not None:
        hooks.job_ended(meeting.client.cause)
    atexit.register(_at_exit)
    threading._register_atexit(_script_over)  # type: ignore[attr-defined]  # atexit's come after threads
    return meeting, hooks


def _at_exit() -> None:
    if _job is not None and _Process.hooks is not None and _Process.meeting is not None \
            and _Process.meeting.client.cause is None:
        _job.backend.stop()
    if _Process.hooks is not None and _Process.meeting is not None:
        _Process.hooks.exiting()
        finalize_mpi()
        _Process.meeting.wait_for_ends()
        if _Process.meeting.client.cause is not None:
            _Process.hooks.exiting()
        _Process.hooks.uninstall()
        _Process.meeting.let_go()
        if _Process.ending is not None:
            _Process.ending.leave_to_the_kernel()


def _script_over() -> None:
    """Runs when Python has run the script, and before it waits for threads that are no daemons."""
    if _Process.meeting is not None:
        _Process.meeting.client.script_over()


def _own_facts(requested: str, launch: Launch) -> dict[str, Any]:
    """What this rank tells the others of itself before the engine starts."""
    names = [requested] if requested != "auto" else backend_names()
    return {
        "host": socket.gethostname(),
        "identity": host_identity(),
        "cores": usable_cores(),
        "requested": requested,
        "objections": {name: _objection(name, launch) for name in names},
        "objections_to_hosts": {name: backend_class(name).objection_to_hosts(launch) for name in names},
        "preferred": _preference(launch) if requested == "auto" else [requested],
    }


def _objection(name: str, launch: Launch) -> str:
    """Why a backend cannot serve here, or "" if it can."""
    chosen = backend_class(name)
    available = chosen.availability()
    return chosen.objection(launch) if available.ok else available.reason


def _preference(launch: Launch) -> list[str]:
    """The order in which `auto` tries the backends.

    On CPUs the native engine leads. On GPUs Horovod does if it was built with NCCL. Of the others, Horovod comes first
    where its own or an MPI launcher started the job, and TensorFlow's collectives do everywhere else.
    """
    import tensorflow as tf

    from hvkeras.backends.horovod.installed import has_nccl

    by_its_launcher = launch.mpi or launch.rendezvous.kind == "horovod_store"
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    first = ["horovod", "tfdist"] if (has_nccl() if has_gpu else by_its_launcher) else ["tfdist", "horovod"]
    first.insert(len(first) if has_gpu else 0, "native")
    return [*first, *(name for name in backend_names() if name not in (*first, "local"))]


def _exchange(client: ControlClient, launch: Launch, settings: Settings, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Waits for all ranks, saying every few seconds who is missing, and returns what each told."""
    told = [0.0]

    def on_missing(ranks: list[int], waited: float) -> None:
        if waited - told[0] >= REPORT_EVERY and (launch.rank == 0 or launch.cluster):
            told[0] = waited
            names = ", ".join(task_name(launch, rank) for rank in ranks)
            say(f"waiting for {names}, {waited:.0f} s of {settings.start_timeout:g} s")

    key = f"facts {_Process.sessions}"
    return client.gather(key, facts, settings.start_timeout, on_missing,
                         describe=lambda ranks: ", ".join(task_name(launch, rank) for rank in ranks))


def _check_local_ranks(launch: Launch, topology: Topology) -> None:
    """Compares the announced local size with the one that host identity gives."""
    if launch.local_size is not None and launch.local_size != topology.local_size:
        raise MachineError(explain(
            f"{launch.launcher} and the ranks' hosts must agree on who shares a host",
            "give each machine a host name of its own, and run ranks of one host in one container",
            announced_local_size=launch.local_size, counted=topology.local_size, hosts=topology.hosts))


def _agree_on_backend(launch: Launch, facts: list[dict[str, Any]]) -> str:
    """Picks the first preferred backend that works on all ranks.

    Raises:
        UsageError: Ranks ask for different backends, or the one asked for cannot serve.
    """
    requested = [fact["requested"] for fact in facts]
    if len(set(requested)) > 1:
        other = next(rank for rank, name in enumerate(requested) if name != requested[0])
        raise UsageError(explain("All ranks must ask for the same backend", "set it once, on the launcher's command"
                                 " line or in the script", rank_0=requested[0], **{f"rank_{other}": requested[other]}))
    problems = {}
    one_host = len({fact["identity"] for fact in facts}) == 1
    for name in facts[0]["preferred"]:
        bad = [(rank, objection) for rank, fact in enumerate(facts)
               if (objection := fact["objections"].get(name, "is not known there")
                   or ("" if one_host else fact["objections_to_hosts"][name]))]
        if not bad:
            return str(name)
        problems[name] = f"{name} on rank {bad[0][0]}: {bad[0][1]}"
    raise MachineError(explain(f"A backend must be able to serve a job of {launch.launcher}: "
                               + "; ".join(problems.values()), "see hvkeras run --check-build for what works here",
                               backend=requested[0], size=len(facts)))


def _share_cores(settings: Settings, facts: list[dict[str, Any]], topology: Topology) -> None:
    """Gives TensorFlow this rank's share of the host's cores, unless switched off."""
    if not settings.threads:
        return
    own = facts[topology.rank]
    share = fair_share(own["cores"], [fact["cores"] for fact in facts if fact["identity"] == own["identity"]])
    if not limit_threads(share) and prints_at(settings, "INFO"):
        say("TensorFlow had started before init(), so its threads stay as they are; call hvd.init() first")


def _check_size(launch: Launch, engine: Backend, counted: int) -> None:
    """Refuses an engine that counts other ranks than the launcher announced.

    Raises:
        MachineError: The sizes differ.
    """
    if counted != launch.size:
        raise MachineError(explain(
            f"{launch.launcher} announced {launch.size} ranks, but {engine.name} ({engine.engine}) counts {counted}",
            "the engine was built for another launcher or MPI; see hvkeras run --check-build",
            launcher_size=launch.size, engine_size=counted))


leave_as_it_is(__name__)
