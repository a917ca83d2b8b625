"""Start of a session: connect the ranks, agree on a backend, and start its engine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from hvkeras.backends import BUILT_IN, ONE_PROCESS, backend_class, require_backend_name
from hvkeras.backends.interface import Backend, Start
from hvkeras.control.announcements import remove_announcement
from hvkeras.control.client import ControlClient
from hvkeras.control.launch_environments import Launch
from hvkeras.control.rendezvous import WaitReports
from hvkeras.errors import MachineError, UnsupportedError, explain
from hvkeras.host.console import format_ranks, in_notebook, prints_at, say, some_of
from hvkeras.host.gpus import GpuPlacement, seen_gpus
from hvkeras.host.machine import fair_share, limit_threads, usable_cores
from hvkeras.host.mpi import world_size
from hvkeras.host.network import host_identity
from hvkeras.host.topology import Topology, topology_from_hosts
from hvkeras.host.versions import must_agree, own_versions
from hvkeras.job.backend_choice import agree_on_backend, facts_of_rank
from hvkeras.job.failure import END_ALWAYS, FailurePolicy
from hvkeras.job.link import JobLink
from hvkeras.job.session import Session, this_process
from hvkeras.settings import Settings, keras_backend

TENSORFLOW = "tensorflow"


def open_session(launch: Launch, settings: Settings, requested: str | None = None,
                 policy: FailurePolicy = END_ALWAYS, without_engine: bool = False) -> Session:
    """Open the session of this process, and make it current.

    Args:
        launch: How this process was launched.
        requested: Requested backend; None for that of the settings.
        policy: Reaction to the failure of another rank; ignored if this rank is already connected.
        without_engine: Whether to connect the ranks without starting an engine, so that collectives are unavailable.

    Raises:
        UsageError: The backend does not support this launch.
        MachineError: A package, port or launcher does not meet the requirements.
        PeerError: A rank is missing or failed.
    """
    # An elastic job may shrink to one rank, and grow again.
    has_server = launch.size > 1 or bool(settings.run_membership)
    if has_server or without_engine:
        session = _session_of_ranks(launch, settings, requested, policy, without_engine)
    else:
        session = _session_of_one(launch, settings, requested)
    this_process().session = session
    return session


def restart_session(session: Session) -> Session:
    """Close a session, and open a new one with the same ranks and backend."""
    session.close()
    return open_session(session.launch, session.settings, session.backend.name)


def _session_of_one(launch: Launch, settings: Settings, requested: str | None) -> Session:
    wanted = requested or settings.backend
    _require_valid(wanted)
    # A plug-in may implement single-process jobs itself.
    name = ONE_PROCESS if wanted == "auto" or wanted in BUILT_IN else wanted
    topology = topology_from_hosts(0, [socket.gethostname()])
    engine, entries = backend_class(name)(), this_process().entries
    engine.start(Start(topology, None, launch, settings))
    entries.backend = engine
    if prints_at(settings, "WARNING"):
        note = f" (requested {wanted}; one process needs no engine)" if wanted not in ("auto", name) else ""
        say(f"backend {engine.name} ({engine.engine}), 1 rank, {launch.started_by}{note}")
        if in_notebook():
            say("a notebook is one process. HINT: hvd.run(train, np=2) runs a function that calls hvd.init() on two")
    return Session(engine, entries, topology, launch, settings, requested=requested)


def _session_of_ranks(launch: Launch, settings: Settings, requested: str | None, policy: FailurePolicy,
                      without_engine: bool) -> Session:
    process = this_process()
    link = process.connect(launch, settings, policy)
    link.hooks.install()
    try:
        _require_valid(requested or settings.backend)  # once connected, so that one rank reports it for all
        return _agree_and_start(link, settings, requested, without_engine)
    except BaseException as error:
        link.hooks.report(error)
        raise


def _require_valid(backend: str) -> None:
    """Check the requested backend, and that of Keras, which may not be imported yet."""
    require_backend_name(backend)
    keras = sys.modules.get("keras")
    loaded = keras.config.backend() if keras is not None and hasattr(keras, "config") else ""
    if (of_keras := loaded or keras_backend() or TENSORFLOW) != TENSORFLOW:
        raise UnsupportedError(explain("Keras must run on TensorFlow", "set KERAS_BACKEND=tensorflow before Keras is"
                                       " imported", keras_backend=of_keras))


def _agree_and_start(link: JobLink, settings: Settings, requested: str | None, without_engine: bool) -> Session:
    process, launch, client = this_process(), link.launch, link.client
    entries, wanted = process.entries, requested or settings.backend
    client.join(entries)
    link.starts += 1
    restarted = link.starts > 1 or bool(settings.run_membership)
    facts = exchange_facts(client, launch, settings, link.starts, own_facts(wanted, launch, settings, restarted))
    remove_announcement(launch, settings)
    link.release_port()
    topology = topology_from_hosts(launch.rank, [fact["host"] for fact in facts],
                                   [fact["identity"] for fact in facts], [fact["cores"] for fact in facts])
    settings = settings_of_rank_0(launch, settings, facts)
    link.set_deadlines(settings)
    check_local_ranks(launch, topology)
    share_cores(settings, facts, topology)
    gpus = GpuPlacement.of(facts)
    gpus.take(topology.rank)

    def session(engine: Backend, devices: tuple[str, ...] = ()) -> Session:
        return Session(engine, entries, topology, launch, settings, client, link.hooks, devices, requested)

    if without_engine:
        return session(backend_class(ONE_PROCESS)())
    choice = agree_on_backend(launch, facts, gpus.each_has_own)
    if choice.without and topology.rank == 0 and prints_at(settings, "WARNING"):
        say(choice.without)
    opened = session(process.engine(choice.name), gpus.devices)
    start_engine(opened, opened.backend, lambda size: check_size(launch, opened.backend, size))
    if topology.rank == 0 and prints_at(settings, "WARNING"):
        _describe(opened, gpus, is_auto=wanted == "auto")
    return opened


def start_engine(session: Session, engine: Backend, check: Callable[[int], None] = lambda _: None) -> None:
    """Start an engine on all ranks of a session.

    Args:
        engine: The backend of the session, or another one.
        check: Called with the number of ranks that the engine reports.
    """
    link = this_process().link
    assert link is not None
    assert session.control is not None
    if engine not in link.hooks.backends:
        link.hooks.backends.append(engine)
    if engine is session.backend:
        session.entries.backend = engine
    size = engine.start(Start(session.topology, session.control, session.launch, session.settings, session.gpus,
                              link.starts))
    link.hooks.reinstall_signals()
    check(size)
    if engine is session.backend:
        session.control.gather(f"started {link.starts}", size, session.settings.start_timeout)


def _describe(session: Session, gpus: GpuPlacement, is_auto: bool) -> None:
    engine, topology = session.backend, session.topology
    hosts = len(set(topology.host_numbers))
    say(f"backend {engine.name} ({engine.engine}), {topology.size} rank{'s' * (topology.size > 1)} on {hosts}"
        f" host{'s' * (hosts > 1)}, {session.launch.started_by}")
    world = world_size()
    if world not in (None, session.launch.size) and session.launch.rendezvous.communicator is None:
        say(f"this job has {session.launch.size} ranks, but MPI.COMM_WORLD has {world}: launch with mpirun where the"
            " script communicates over MPI as well")
    if unused := max(fact["gpus"]["unused"] for fact in gpus.facts):
        say(f"the driver has {unused} GPU{'s' * (unused > 1)}, but TensorFlow sees none, and trains on the CPUs. HINT:"
            " pip install 'tensorflow[and-cuda]'")
    if gpus.sentence():
        say(gpus.sentence() + _gpu_transport(engine, gpus, is_auto))


def _gpu_transport(engine: Backend, gpus: GpuPlacement, is_auto: bool) -> str:
    over_nccl = engine.transport == "NCCL"
    why = ("each rank has its own GPU" if over_nccl else "no backend here has NCCL" if gpus.each_has_own
           else "NCCL needs a GPU for each rank")
    return f"; tensors go {'over NCCL' if over_nccl else 'through host memory'}" + (f", as {why}" if is_auto else "")


# Facts that ranks exchange at the start, and checks before and after the engine starts.


def own_facts(requested: str, launch: Launch, settings: Settings, restarted: bool = False) -> dict[str, Any]:
    """Return the facts that this rank sends to the other ranks before the engine starts; see `facts_of_rank`."""
    return {"host": socket.gethostname(), "identity": host_identity(), "cores": usable_cores(),
            "versions": own_versions(), "settings": settings.shared(), "gpus": seen_gpus(settings.gpu_placement),
            **facts_of_rank(requested, launch, restarted)}


def exchange_facts(client: ControlClient, launch: Launch, settings: Settings, session: int,
                   facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather the facts of all ranks, in rank order, and print repeatedly which ranks are missing.

    Raises:
        PeerError: A rank did not arrive in time.
        MachineError: Ranks run different versions.
    """
    reports = WaitReports()

    def names(ranks: list[int]) -> str:
        return some_of([launch.task_name(rank) for rank in ranks]) if launch.tasks else format_ranks(ranks)

    def on_missing(ranks: list[int], waited: float) -> None:
        if (launch.rank == 0 or launch.cluster) and reports.is_due(waited):
            say(f"waiting for {names(ranks)}, {waited:.0f} s of {settings.start_timeout:g} s")

    found = client.gather(f"facts {session}", facts, settings.start_timeout, on_missing, describe=names)
    check_versions(launch, settings, found)
    return found


def settings_of_rank_0(launch: Launch, settings: Settings, facts: list[dict[str, Any]]) -> Settings:
    """Return this rank's settings, with the job-wide ones of rank 0. Rank 0 prints which ranks differ.

    Args:
        launch: How this process was launched.
        settings: Settings of this rank.
        facts: Facts of each rank.
    """
    first = facts[0]["settings"]
    if launch.rank == 0 and prints_at(settings, "WARNING"):
        for name, value in first.items():
            others: dict[str, list[int]] = {}
            for rank, fact in enumerate(facts):
                if (other := fact["settings"][name]) != value:
                    others.setdefault(_value_text(other), []).append(rank)
            if others:
                values = some_of([f"{other} on {format_ranks(ranks)}" for other, ranks in others.items()])
                say(f"HVKERAS_{name.upper()} is {_value_text(value)} on rank 0, {values}; all ranks use"
                    " the value of rank 0")
    return settings.with_shared(first)


def _value_text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}" if isinstance(
        value, float) else str(value)


def check_versions(launch: Launch, settings: Settings, facts: list[dict[str, Any]]) -> None:
    """Check that all ranks have the same versions; rank 0 prints differences of TensorFlow and Keras, which may differ.

    Raises:
        MachineError: The versions of hvkeras or of Python differ.
    """
    first = facts[0]["versions"]
    for rank, fact in enumerate(facts):
        own = fact["versions"]
        if must_agree(own) != must_agree(first):
            raise MachineError(explain(
                "All ranks must run the same versions of Python and hvkeras", "install the same versions on every host,"
                " or use the same image", **{f"rank_0_on_{facts[0]['host']}": must_agree(first),
                                         f"rank_{rank}_on_{fact['host']}": must_agree(own)}))
        if own != first and launch.rank == 0 and prints_at(settings, "WARNING"):
            differ = ", ".join(f"{name} {first.get(name, 'none')} and {own.get(name, 'none')}"
                               for name in sorted(first.keys() | own.keys()) if first.get(name) != own.get(name))
            say(f"versions differ between rank 0 on {facts[0]['host']} and rank {rank} on {fact['host']}: {differ}")
            return


def check_local_ranks(launch: Launch, topology: Topology) -> None:
    """Compare the announced local size with the one derived from the hosts' identities."""
    if launch.local_size is not None and launch.local_size != topology.local_size:
        raise MachineError(explain(
            f"{launch.launcher} and the ranks' hosts must agree on which ranks share a host",
            "give each machine a unique host name, and run ranks of one host in one container",
            announced_local_size=launch.local_size, counted=topology.local_size, hosts=topology.hosts))


def share_cores(settings: Settings, facts: list[dict[str, Any]], topology: Topology) -> None:
    """Limit TensorFlow to this rank's share of the host's cores, unless that is disabled."""
    if not settings.threads:
        return
    own = facts[topology.rank]
    share = fair_share(own["cores"], [fact["cores"] for fact in facts if fact["identity"] == own["identity"]])
    if not limit_threads(share) and prints_at(settings, "INFO"):
        say("TensorFlow started before init(), so its threads cannot be changed; call hvd.init() first")


def check_size(launch: Launch, engine: Backend, counted: int) -> None:
    """Check that the engine counts as many ranks as the launcher announced.

    Raises:
        MachineError: The sizes differ.
    """
    if not isinstance(counted, int):
        raise MachineError(explain(f"start() of the backend {engine.name!r} must return the number of ranks",
                                   f"return it from {type(engine).__name__}.start()", returned=counted))
    if counted != launch.size:
        raise MachineError(explain(
            f"{launch.launcher} announced {launch.size} ranks, but {engine.name} ({engine.engine}) counts {counted}",
            "the engine was built for another launcher or MPI (hvkeras run --check-build), or start() returned a wrong"
            " number",
            launcher_size=launch.size, engine_size=counted))
