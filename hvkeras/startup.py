"""Joins and leaves the job of this process: `init()` and `shutdown()`; `job.session_start` opens the session."""

from __future__ import annotations

from collections.abc import Sequence

from hvkeras.autograph import exclude_from_autograph
from hvkeras.backends import backend_class, backend_for_strategies
from hvkeras.backends.capabilities import HostsStrategies
from hvkeras.backends.interface import Backend
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import open_closed_streams, quiet_engines
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import Session, current_session, is_initialized, this_process
from hvkeras.job.session_start import open_session, start_engine
from hvkeras.launch_environments import Launch, detect_launch
from hvkeras.launch_environments.communicator import launch_of
from hvkeras.requirements import require_tensorflow
from hvkeras.settings import Settings


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
        from hvkeras.training.session_services import add_process_sets  # noqa: PLC0415 - imports TensorFlow

        running = current_session().backend.name
        if backend not in (None, "auto", running):
            raise UsageError(explain("init() must be called with one backend", "call hvd.shutdown() in between",
                                     running=running, backend=backend))
        add_process_sets(process_sets)
        return
    settings = _prepared()
    if (requested := backend or settings.backend) != "auto":
        backend_class(requested)
    launch = _launch(settings, comm)
    if launch.rendezvous.kind == "standby":
        from hvkeras.elastic.worker_membership import join_running_job  # noqa: PLC0415 - imports TensorFlow

        join_running_job(launch, settings, backend, process_sets)
        return
    _begin(open_session(launch, settings, backend), process_sets)


def _prepared() -> Settings:
    """Prepares this process for a session, and returns its settings."""
    process = this_process()
    process.require_rank()
    open_closed_streams()
    require_tensorflow()
    settings = Settings()
    process.remember_program()
    quiet_engines(settings.log_level)
    return settings


def _launch(settings: Settings, comm: object = None) -> Launch:
    """Returns how this process was launched; a generation of an elastic job is that which it has joined last."""
    link = this_process().link
    if link is not None and settings.run_membership:
        return link.launch
    return detect_launch() if comm is None else launch_of(detect_launch(), comm)


def _begin(session: Session, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None) -> None:
    from hvkeras.training.session_services import start_services  # noqa: PLC0415 - imports TensorFlow

    start_services(session, process_sets)


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
        settings = _prepared()
        launch = _launch(settings)
        _begin(open_session(launch, settings, name if launch.size > 1 else None))
    session, process = current_session(), this_process()
    if (session.topology.size == 1 or isinstance(session.backend, HostsStrategies) or session.control is None
            or session.hooks is None):
        return session.backend
    engine = process.engine(name)
    if engine not in session.hooks.backends:
        start_engine(session, engine)
    return engine


def init_without_engine() -> Session:
    """Joins a job of several ranks as `init()` does, but starts no engine.

    `hvkeras bench` uses this to measure MPI by itself, and training without communication.

    Returns:
        The session, whose backend communicates nothing.

    Raises:
        UsageError: The launcher's environment variables cannot be read.
        MachineError: A port or launcher does not meet the job's needs.
        PeerError: A rank is missing or failed.
    """
    settings = Settings()
    quiet_engines(settings.log_level)
    return open_session(detect_launch(), settings, without_engine=True)


def shutdown() -> None:
    """Leaves the job in good order; all ranks may then call `init()` again.

    The record is written and Keras restored first (`stop_services`), then the session closes: what it holds, the latest
    first, then its engine and its hooks (`Session.close`). The control channel stays open until the process exits.
    """
    if not is_initialized():
        return
    from hvkeras.training.session_services import stop_services  # noqa: PLC0415 - imports TensorFlow

    stop_services()
    current_session().close()


exclude_from_autograph(__name__)
