"""Joins and leaves the job of this process: `init()` and `shutdown()`."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.autograph import exclude_from_autograph
from hvkeras.backends import BUILT_IN, ONE_PROCESS, backend_class, backend_for_strategies
from hvkeras.backends.capabilities import HostsStrategies
from hvkeras.backends.interface import Backend, Start
from hvkeras.backends.refusing import ForkedBackend, StandbyBackend
from hvkeras.control.announcements import remove_announcement
from hvkeras.control.cause import Cause
from hvkeras.control.channel import ControlChannel
from hvkeras.control.lobby import ANY_FUNCTION, LobbyClient
from hvkeras.control.process_exit import ExitWatch
from hvkeras.control.relay import Deadlines
from hvkeras.control.rendezvous import connect
from hvkeras.control.waiting import Waiting
from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.host.console import open_closed_streams, prints_at, quiet_engines, say
from hvkeras.host.cores import limit_threads, usable_cores
from hvkeras.host.forks import at_exit, at_script_end, call_in_children, end_without_libraries
from hvkeras.host.gpus import GpuPlacement, seen_gpus, take_gpus
from hvkeras.host.mpi import crashes_at_exit, finalize_mpi, running_mpi
from hvkeras.host.network import split_address
from hvkeras.host.program import Program
from hvkeras.host.topology import Topology, topology_from_hosts
from hvkeras.job.backend_choice import agree_on_backend
from hvkeras.job.failure import FailureHooks
from hvkeras.job.process_sets import ProcessSet, add_process_set, forget_process_sets, registered_process_sets
from hvkeras.job.start_checks import (
    check_local_ranks,
    check_size,
    exchange_facts,
    own_facts,
    settings_of_rank_0,
    share_cores,
)
from hvkeras.job.state import Job, current_job, is_initialized, job_number, replace_job
from hvkeras.launch_environments import Launch, describe_cluster, detect_launch, hvkeras_run
from hvkeras.launch_environments.communicator import launch_of, world_size
from hvkeras.launch_environments.starter import open_starter
from hvkeras.requirements import require_tensorflow
from hvkeras.settings import Settings, ignored_variables

if TYPE_CHECKING:
    from hvkeras.plans.entry_counts import EntryCounts


LOBBY_RETRY = 0.1  # seconds between two attempts to reach an elastic job's launcher
ABORT_WITHIN = 2.0  # seconds for engines to be aborted, once another rank has failed


class _Process:
    """State that outlives `shutdown()`: the channel, the counts, and engines that cannot start twice."""

    channel: ControlChannel | None = None
    launch: Launch | None = None
    hooks: FailureHooks | None = None
    entries: EntryCounts | None = None
    exit_watch: ExitWatch | None = None
    engines: dict[str, Backend] = {}  # noqa: RUF012 - one per process on purpose
    sessions = 0  # starts of an engine on the present control channel
    requested: str | None = None  # the argument of the last `init()`
    at_exit_registered = False
    inherited: Any = None  # in a process forked from a rank: the rank's channel and engines, which must not be freed
    survives = False  # see `survive_failures`
    on_terminate: Callable[[], None] | None = None
    start_anew: Callable[[], None] | None = None
    when_stuck: Callable[[Cause], None] | None = None
    program: Program | None = None  # as it was before the first `init()`
    lobby: LobbyClient | None = None
    commit: int | None = None  # that the present generation has begun with, in a process that joined it in `init()`


def init(
    backend: str | None = None, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None,
    comm: object = None,
) -> None:
    """Joins the job that launched this process, and starts its collective engine.

    All ranks first connect to a small control channel, so that a missing or misconfigured rank is named before any
    engine can hang. Rank 0 prints one line with the backend, engine, size and launcher. Calling `init()` again
    registers new process sets and does nothing else.

    Example:
        import hvkeras as hvd
        hvd.init()                    # or hvd.init("tfdist")
        print(hvd.rank(), hvd.size())

    Args:
        backend: The engine: `auto`, one of the built-in `native`, `horovod`, `tfdist`, `local`, or a plug-in's name.
            By default, the environment variable HVKERAS_BACKEND decides, then what works here.
        process_sets: `ProcessSet`s to register on all ranks; "dynamic" is accepted and has no effect.
        comm: The ranks that form the job: None for all that were launched, or a communicator of mpi4py, under an MPI
            launcher. With a part of the ranks, such as `MPI.COMM_WORLD.Split(color)`, each part is a job of its own.

    Raises:
        UsageError: The backend does not exist or cannot serve this launch, the launcher's environment variables cannot
            be read, or `comm` does not belong to what was launched.
        MachineError: A package, port or launcher does not meet the job's needs.
        PeerError: A rank is missing or failed.
    """
    if backend is not None and not isinstance(backend, str):
        backend, comm = None, backend
    if is_initialized():
        running = current_job().backend.name
        if backend not in (None, "auto", running):
            raise UsageError(explain("init() must be called with one backend", "call hvd.shutdown() in between",
                                     running=running, backend=backend))
        _add_process_sets(process_sets)
        return
    _require_own_process()
    open_closed_streams()
    require_tensorflow()
    settings = Settings()
    _Process.program = _Process.program or Program.of_this_process()
    quiet_engines(settings.log_level)
    requested = backend or settings.backend
    if requested != "auto":
        backend_class(requested)
    launch = launch_of(detect_launch(), comm)
    _Process.requested = backend
    if launch.rendezvous.kind == "standby":
        if settings.run_standby == hvkeras_run.JOINS_AT_COMMIT and (
                requested == "auto" or backend_class(requested).starts_after_failure):
            replace_job(_standby_job(launch, settings))
            _install_hooks(settings)
        else:
            _join_at_start(settings, requested, process_sets)
        return
    is_served = launch.size > 1 or bool(settings.run_lobby)  # an elastic job may shrink to one rank, and grow again
    job = (_multi_process_job if is_served else _single_process_job)(launch, settings, requested)
    replace_job(job)
    _start_services(job, process_sets)


def init_for_strategy() -> Backend:
    """Joins the job as `init()` does, unless that was called before, with an engine that hosts strategies.

    A job that has another engine keeps it and runs this one beside it.

    Returns:
        An engine that hosts strategies, or the job's own engine if there is only one process.

    Raises:
        HvkerasError: As for `init()`, or TensorFlow was used before.
    """
    name = backend_for_strategies()
    if not is_initialized():
        _require_own_process()
        open_closed_streams()
        settings = Settings()
        quiet_engines(settings.log_level)
        launch = detect_launch()
        built = (_multi_process_job(launch, settings, name) if launch.size > 1
                 else _single_process_job(launch, settings, settings.backend))
        replace_job(built)
        _start_services(built, None)
    job = current_job()
    if job.topology.size == 1 or isinstance(job.backend, HostsStrategies) or job.control is None or job.hooks is None:
        return job.backend
    engine = _Process.engines.setdefault(name, backend_class(name)())
    if engine not in job.hooks.backends:
        engine.start(Start(job.topology, job.control, job.launch, job.settings, job.gpus, _Process.sessions))
        job.hooks.backends.append(engine)
        job.hooks.reinstall_signals()
    return engine


def _start_services(job: Job, process_sets: Any) -> None:
    """Starts what accompanies a job: the record, the hooks around `fit`, the timeline, and process sets."""
    if job.control is not None:
        from hvkeras.collectives import join, mismatch  # noqa: PLC0415 - imports TensorFlow

        job.control.on_involvement = join.on_message
        job.control.on_refusal = mismatch.refuse
    ignored = {} if job.backend.reads_horovods_variables else ignored_variables()
    if ignored and job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
        say("ignored: " + "; ".join(f"{name} ({why})" for name, why in ignored.items()))
    records = bool(job.settings.record or job.settings.report or job.settings.trace_steps)
    if records:
        from hvkeras.profiling import recorder  # noqa: PLC0415 - imports TensorFlow

        recorder.start(job)
    if job.launch.size > 1 or job.settings.run_lobby or records:
        _install_hooks(job.settings)
    if job.settings.timeline:
        from hvkeras.profiling.timeline import start_timeline  # noqa: PLC0415 - imports TensorFlow

        start_timeline(job.settings.timeline)
    _add_process_sets(process_sets)


def _install_hooks(settings: Settings) -> None:
    from hvkeras import compat  # noqa: PLC0415 - imports TensorFlow
    from hvkeras.training import fit_hooks  # noqa: PLC0415 - imports TensorFlow

    fit_hooks.install()
    if settings.run_lobby:
        compat.hook_traces(anew=job_number() > 1)


def _add_process_sets(process_sets: str | Sequence[ProcessSet | Sequence[int]] | None) -> None:
    """Registers the process sets that are not registered yet."""
    if not process_sets or isinstance(process_sets, str):  # Horovod's "dynamic" has no effect here
        return
    for process_set in process_sets:
        if not any(process_set is known for known in registered_process_sets().values()):
            add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job in good order; all ranks may then call `init()` again."""
    if not is_initialized():
        return
    from hvkeras import compat  # noqa: PLC0415 - imports TensorFlow
    from hvkeras.profiling import recorder, timeline  # noqa: PLC0415 - imports TensorFlow

    recorder.finish()
    timeline.stop_timeline()
    compat.unhook_all()
    forget_process_sets()
    job = current_job()
    replace_job(None)
    job.backend.stop()
    if job.hooks is not None:
        job.hooks.uninstall()
        job.hooks.backends = []
    if job.control is not None:
        job.control.leave()


def leave_generation() -> None:
    """Leaves the present ranks of an elastic job, which go on without this one or have failed.

    `join_generation` joins the next ones. Unlike `shutdown()`, it gives up the control channel as well.
    """
    channel, hooks = _Process.channel, _Process.hooks
    if channel is not None and hooks is not None and channel.client.cause is not None:
        hooks.aborted.wait(ABORT_WITHIN)  # else it would abort the engine of the next ranks
    if is_initialized():
        shutdown()
    elif hooks is not None:  # the ranks did not come together
        for backend in hooks.backends:
            backend.stop()
        hooks.uninstall()
        hooks.backends = []
    if channel is not None:
        channel.close()
    if _Process.entries is not None:
        _Process.entries.is_over = True
    _Process.channel = _Process.launch = _Process.hooks = _Process.entries = None
    _Process.sessions = 0


def survive_failures(survives: bool, on_terminate: Callable[[], None] | None = None,
                     start_anew: Callable[[], None] | None = None,
                     when_stuck: Callable[[Cause], None] | None = None) -> None:
    """Sets whether this process outlives the failure of another rank, in this generation and the next ones.

    Args:
        survives: Whether it does.
        on_terminate: What SIGTERM does then, instead of ending the process.
        start_anew: Starts this process's program anew when another rank has failed; None to let the main thread go on.
        when_stuck: Called if the main thread does not go on.
    """
    _Process.survives, _Process.on_terminate = survives, on_terminate
    _Process.start_anew, _Process.when_stuck = start_anew, when_stuck
    if _Process.hooks is not None:
        _set_survival(_Process.hooks)


def _set_survival(hooks: FailureHooks) -> None:
    hooks.survives, hooks.on_terminate = _Process.survives, _Process.on_terminate
    hooks.start_anew, hooks.when_stuck = _Process.start_anew, _Process.when_stuck


def outlived_failure() -> bool:
    """Whether another rank's failure has ended the generation that this process belongs to, or tries to join."""
    hooks, channel = _Process.hooks, _Process.channel
    return hooks is not None and channel is not None and channel.client.cause is not None and hooks.outlives(
        channel.client.cause)


def join_generation(variables: Mapping[str, str]) -> None:
    """Joins the next ranks of an elastic job, with the backend of the first `init()`.

    Args:
        variables: The environment variables that give this process its place.

    Raises:
        HvkerasError: As for `init()`.
    """
    os.environ.update(variables)
    os.environ.pop(hvkeras_run.STANDBY, None)
    replace_job(None)
    init(_Process.requested)


def _join_at_start(settings: Settings, requested: str, process_sets: Any) -> None:
    """Joins the next ranks of an elastic job as soon as its workers make a change, for engines that start only once.

    Until the first elastic function, this process starts anew if a rank is lost.
    """
    last = int(settings.run_handover.partition(":")[2] or -1)
    answer = lobby(settings).next_generation(last, ANY_FUNCTION)
    _Process.commit = answer["commit"]
    os.environ.update(answer["place"])
    os.environ.pop(hvkeras_run.STANDBY, None)
    survive_failures(True, start_anew=start_anew)
    try:
        replace_job(_multi_process_job(detect_launch(), Settings(), requested))
    except PeerError:
        if not outlived_failure():
            raise
        start_anew()
    lobby(settings).tell({"type": "joined"})
    _start_services(current_job(), process_sets)


def lobby(settings: Settings) -> LobbyClient:
    """Returns this worker's connection to the lobby of its elastic job."""
    _require_own_process()
    waiting = Waiting(settings.start_timeout)
    while _Process.lobby is None:
        try:
            _Process.lobby = LobbyClient(split_address(settings.run_lobby), settings.secret.encode(),
                                         settings.run_worker, settings.liveness_timeout)
        except OSError as error:
            waiting.check(f"the launcher, which listens for workers at {settings.run_lobby}", str(error))
            time.sleep(LOBBY_RETRY)
    return _Process.lobby


def commit_at_start() -> int | None:
    """Returns the commit that the present ranks have begun with, if this process joined them in `init()`."""
    return _Process.commit


def start_anew(descriptor: int | None = None, commit: int = -1, joins: str = hvkeras_run.JOINS_AT_START) -> None:
    """Starts this process's program anew, which joins the next ranks of its elastic job.

    Args:
        descriptor: A file with commits; by default the one that this process was started with, if any.
        commit: The number of the last one of them.
        joins: When it joins them: a value of `hvkeras_run.STANDBY`.
    """
    assert _Process.program is not None
    handover = os.environ.get(hvkeras_run.HANDOVER, "") if descriptor is None else f"{descriptor}:{commit}"
    kept = int(handover.partition(":")[0]) if handover else None
    _Process.program.start_anew({hvkeras_run.STANDBY: joins, hvkeras_run.HANDOVER: handover}, kept)


def init_without_engine() -> Job:
    """Joins a job of several ranks as `init()` does, but starts no engine.

    `hvkeras bench` uses this to measure MPI by itself, and training without communication.

    Returns:
        The job, whose backend communicates nothing.

    Raises:
        UsageError: The launcher's environment variables cannot be read.
        MachineError: A port or launcher does not meet the job's needs.
        PeerError: A rank is missing or failed.
    """
    settings = Settings()
    quiet_engines(settings.log_level)
    job = _multi_process_job(detect_launch(), settings, ONE_PROCESS, placeholder=backend_class(ONE_PROCESS)())
    replace_job(job)
    return job


def _entries() -> EntryCounts:
    from hvkeras.plans.entry_counts import EntryCounts  # noqa: PLC0415 - imports TensorFlow; the settings come first

    if _Process.entries is None:
        _Process.entries = EntryCounts()
    return _Process.entries


def _standby_job(launch: Launch, settings: Settings) -> Job:
    """Builds the job of a worker that will join a running elastic job: its ranks and sizes are expected ones."""
    own, local_size = socket.gethostname(), launch.local_size or 1
    topology = Topology(launch.rank, launch.size, launch.local_rank or 0, local_size, 0, 1, (own,) * launch.size,
                        (local_size,) * launch.size, (0,) * launch.size)
    if settings.threads:
        limit_threads(max(1, len(usable_cores()) // local_size))
    gpus = seen_gpus(settings.gpu_placement)
    if gpus["ids"] and gpus["taken"] is None:
        take_gpus([topology.local_rank % len(gpus["ids"])])
    return Job(launch, settings, topology, StandbyBackend(), _entries(), None, None)


def _single_process_job(launch: Launch, settings: Settings, requested: str) -> Job:
    """Builds a job of one process with the local backend, unless a plug-in was requested."""
    # A plug-in may handle single-process jobs in its own way.
    name = ONE_PROCESS if requested == "auto" or requested in BUILT_IN else requested
    topology = topology_from_hosts(0, [socket.gethostname()])
    engine = backend_class(name)()
    engine.start(Start(topology, None, launch, settings))
    _entries().backend = engine
    if prints_at(settings, "WARNING"):
        asked = f" ({requested} was asked for; one process needs no engine)" if requested not in ("auto", name) else ""
        say(f"backend {engine.name} ({engine.engine}), 1 rank, launched by {launch.launcher}{asked}")
    return Job(launch, settings, topology, engine, _entries(), None, None)


def _multi_process_job(launch: Launch, settings: Settings, requested: str, placeholder: Backend | None = None) -> Job:
    """Builds a job of several ranks: connects, agrees on a backend, starts the engine, and checks its number of ranks.

    A placeholder stands in for engines that the caller will start.
    """
    channel, hooks = _open_control_channel(launch, settings)
    client = channel.client
    hooks.install()
    try:
        entries = _entries()
        client.join(entries)
        _Process.sessions += 1
        facts = exchange_facts(client, launch, settings, _Process.sessions, own_facts(requested, launch, settings))
        remove_announcement(launch, settings)
        channel.release_port()
        topology = topology_from_hosts(launch.rank, [fact["host"] for fact in facts],
                                       [fact["identity"] for fact in facts], [fact["cores"] for fact in facts])
        settings = settings_of_rank_0(launch, settings, facts)
        _set_deadlines(channel, hooks, launch, settings)
        check_local_ranks(launch, topology)
        share_cores(settings, facts, topology)
        gpus = GpuPlacement.of(facts)
        gpus.take(topology.rank)
        if placeholder is not None:
            return Job(launch, settings, topology, placeholder, entries, client, hooks)
        name = agree_on_backend(launch, facts, gpus.each_has_own)
        engine = _Process.engines.setdefault(name, backend_class(name)())
        hooks.backends = [engine]
        entries.backend = engine
        engine_size = engine.start(Start(topology, client, launch, settings, gpus.devices, _Process.sessions))
        hooks.reinstall_signals()
        check_size(launch, engine, engine_size)
        client.gather(f"started {_Process.sessions}", engine_size, settings.start_timeout)
    except BaseException as error:
        hooks.report(error)
        raise
    if topology.rank == 0 and prints_at(settings, "WARNING"):
        hosts = len({fact["identity"] for fact in facts})
        say(f"backend {engine.name} ({engine.engine}), {topology.size} rank{'s' * (topology.size > 1)} on {hosts}"
            f" host{'s' * (hosts > 1)},"
            f" launched by {launch.launcher}")
        _say_of_mpi(launch)
        if gpus.sentence():
            say(gpus.sentence() + _way_of_gpu_tensors(engine, gpus, requested == "auto"))
    return Job(launch, settings, topology, engine, entries, client, hooks, gpus.devices)


def _say_of_mpi(launch: Launch) -> None:
    """Says what a script that uses MPI by itself must know."""
    world = world_size()
    if world not in (None, launch.size) and launch.rendezvous.communicator is None:
        say(f"this job has {launch.size} ranks, but MPI.COMM_WORLD has {world}: launch with mpirun where the script"
            " communicates over MPI as well")
    if crashes_at_exit():
        say("mpi4py.MPI was imported before TensorFlow, with whose hwloc Open MPI may crash at the end: import"
            " tensorflow first, or set LD_BIND_NOW=1")


def _way_of_gpu_tensors(engine: Backend, gpus: GpuPlacement, is_auto: bool) -> str:
    """Says how an engine moves the tensors of GPUs, and why `auto` has chosen that."""
    over_nccl = engine.transport == "NCCL"
    why = ("each rank has a GPU of its own" if over_nccl else "no backend here has NCCL" if gpus.each_has_own
           else "NCCL needs a GPU for each rank")
    return f"; tensors go {'over NCCL' if over_nccl else 'through host memory'}" + (f", as {why}" if is_auto else "")


def _open_control_channel(launch: Launch, settings: Settings) -> tuple[ControlChannel, FailureHooks]:
    """Connects to the control channel, once per process."""
    if _Process.channel is not None and _Process.hooks is not None:
        if launch != _Process.launch:
            raise UsageError(explain("init() must find the launch environment of its first call",
                                     "do not change the launcher's variables between init() calls",
                                     first=_Process.launch, now=launch))
        return _Process.channel, _Process.hooks
    if launch.rank == 0 and launch.cluster and prints_at(settings, "WARNING"):
        say(describe_cluster(launch))

    def on_end(cause: Cause) -> None:
        if _Process.hooks is not None:
            _Process.hooks.job_ended(cause)

    channel = connect(launch, settings, on_end)
    if launch.rendezvous.kind != "run" and (starter_descriptor := open_starter()) is not None:
        channel.client.watch_starter(starter_descriptor)
    hooks = FailureHooks(channel.client, socket.gethostname(), settings.exit_grace, prints_at(settings, "DEBUG")
                         and settings.log_level in ("DEBUG", "TRACE"), settings.run_cause)
    _set_deadlines(channel, hooks, launch, settings)
    _set_survival(hooks)
    _Process.channel, _Process.hooks, _Process.launch = channel, hooks, launch
    if channel.client.cause is not None:
        hooks.job_ended(channel.client.cause)
    if _Process.at_exit_registered:
        return channel, hooks
    _Process.at_exit_registered = True
    at_exit(_at_exit)
    at_script_end(_script_over)
    return channel, hooks


def _require_own_process() -> None:
    if _Process.inherited is not None:
        raise UsageError(explain("Only a rank's own process can join a job, not one that it has forked",
                                 "call init() and what communicates in the rank's own process"))


def _in_child() -> None:
    """Makes a process that was forked from a rank none: it knows its rank, and takes no part in the job."""
    channel, lobby_client = _Process.channel, _Process.lobby
    if channel is None and lobby_client is None and _Process.inherited is None:
        return
    end_without_libraries()
    if is_initialized() and _Process.inherited is None:
        job, entries = current_job(), type(current_job().entries)()
        entries.backend = backend = ForkedBackend(job.backend)
        replace_job(dataclasses.replace(job, backend=backend, entries=entries, control=None, hooks=None))
    _Process.inherited = channel, lobby_client, _Process.hooks, _Process.entries, _Process.engines, _Process.inherited
    _Process.channel = _Process.hooks = _Process.entries = _Process.lobby = _Process.exit_watch = None
    _Process.engines = {}


def _set_deadlines(channel: ControlChannel, hooks: FailureHooks, launch: Launch, settings: Settings) -> None:
    """Sets how long this rank waits, and whoever serves the channel, who may have been started with other settings."""
    channel.client.watch_progress(settings.stall_warning, settings.stall_shutdown)
    channel.client.liveness = settings.liveness_timeout
    _Process.exit_watch = ExitWatch(f"rank {launch.rank} on {socket.gethostname()} (pid {os.getpid()})",
                                    settings.stall_warning, settings.stall_shutdown, settings.liveness_timeout)
    channel.client.watch_exit(_Process.exit_watch)
    hooks.grace = settings.exit_grace
    if launch.rank == 0:
        channel.client.set_deadlines(Deadlines.from_settings(settings))


def _at_exit() -> None:
    if is_initialized() and _Process.hooks is not None and _Process.channel is not None \
            and _Process.channel.client.cause is None:
        current_job().backend.stop()
    if _Process.hooks is not None and _Process.channel is not None:
        _Process.hooks.exiting()
        finalize_mpi()
        _Process.channel.wait_for_exits(held=running_mpi() is not None)
        if _Process.channel.client.cause is not None:
            _Process.hooks.exiting()
        _Process.hooks.uninstall()
        _Process.channel.stop_reading()
        if _Process.exit_watch is not None:
            _Process.exit_watch.arm_last_resort()


def _script_over() -> None:
    """Called after Python has run the script, and before it waits for non-daemon threads."""
    if _Process.channel is not None:
        _Process.channel.client.script_ended()


call_in_children(_in_child)
exclude_from_autograph(__name__)
