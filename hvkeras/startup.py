"""`init()` and `shutdown()`, to join and leave the job of this process, and `strategy()`, to build its strategy.

`job.session_start` opens the session.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvkeras.backends import backend_for_strategies
from hvkeras.backends.capabilities import HostsStrategies
from hvkeras.backends.interface import Backend
from hvkeras.control.launch_environments import Launch, detect_launch
from hvkeras.control.launch_environments.communicator import launch_of
from hvkeras.control.launch_environments.tf_config import EXAMPLE_WITH_SERVERS
from hvkeras.errors import MachineError, UsageError, explain, require_tensorflow
from hvkeras.host.console import open_closed_streams, quiet_engines
from hvkeras.job.autograph import exclude_from_autograph
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import Session, current_session, is_initialized, this_process
from hvkeras.job.session_start import open_session, start_engine
from hvkeras.settings import Settings
from hvkeras.typing import Strategy


def init(
    backend: str | None = None, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None,
    comm: object = None,
) -> None:
    """Join the job that launched this process, and start its collective engine.

    All ranks first connect to a small control channel, so that a missing or misconfigured rank is named before any
    engine can hang. Rank 0 prints one line with the backend, engine, size and launcher. Another call of `init()`
    registers new process sets and does nothing else.

    Example:
        import hvkeras as hvd
        hvd.init()                    # or hvd.init("tfdist")
        print(hvd.rank(), hvd.size())

    Args:
        backend: The engine: `auto`, one of the built-in `native`, `horovod`, `tfdist`, `local`, or the name of a
            plug-in. By default, the environment variable HVKERAS_BACKEND, then the first engine that works here.
        process_sets: `ProcessSet`s to register on all ranks; "dynamic" is accepted and has no effect.
        comm: The ranks of the job: None for all launched ranks, or an mpi4py communicator under an MPI launcher. With a
            subset of the ranks, such as `MPI.COMM_WORLD.Split(color)`, each subset is a separate job.

    Raises:
        UsageError: The backend does not exist or does not support this launch, the launcher's environment variables
            cannot be read, or `comm` does not belong to the launched ranks.
        MachineError: A package, port or launcher does not meet the requirements of the job.
        PeerError: A rank is missing or failed.
    """
    if backend is not None and not isinstance(backend, str):
        backend, comm = None, backend
    join(backend, process_sets, comm)


def join(backend: str | None = None, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None,
         comm: object = None, launch: Launch | None = None) -> None:
    """Join a job like `init()`.

    Args:
        backend: As for `init()`.
        process_sets: As for `init()`.
        comm: As for `init()`.
        launch: How this process was launched; by default, as its environment says.

    Raises:
        HvkerasError: As for `init()`.
    """
    if is_initialized():
        from hvkeras.training.session_services import add_process_sets  # noqa: PLC0415 - imports TensorFlow

        running = current_session().backend.name
        if backend not in (None, "auto", running):
            raise UsageError(explain("A running job keeps its backend", "call hvd.shutdown() before init()",
                                     running=running, backend=backend))
        add_process_sets(process_sets)
        return
    settings = _prepare()
    launch = launch or _current_launch(settings, comm)
    if launch.rendezvous.kind == "standby":
        from hvkeras.elastic.worker_membership import join_running_job  # noqa: PLC0415 - imports TensorFlow

        join_running_job(launch, settings, backend, process_sets)
        return
    _start_services(open_session(launch, settings, backend), process_sets)


def data_parallel(backend: str | None = None) -> None:
    """Train the rest of a script for one process on all ranks, with the result of one process.

    Join the job as `init()` does. From then on, `fit`, `evaluate`, `predict`, `train_on_batch` and `test_on_batch` of
    Keras 3 mean what they mean in one process: every rank gets the same data, `batch_size` is that of all ranks
    together, and each row of a batch is computed on one rank. `hvkeras run --data-parallel` does the same without a
    line in the script.

    Example:
        import hvkeras as hvd
        hvd.data_parallel()          # the script below is one for one process

    Args:
        backend: The engine, as for `init()`.

    Raises:
        UsageError: As for `init()`.
        UnsupportedError: Keras is tf_keras, too old, or runs on a backend other than TensorFlow.
        MachineError: As for `init()`.
        PeerError: As for `init()`.
    """
    init(backend)
    from hvkeras.global_batch.mode import start  # noqa: PLC0415 - imports TensorFlow

    start()


def _prepare() -> Settings:
    """Prepare this process for a session, and return its settings."""
    process = this_process()
    process.require_rank()
    open_closed_streams()
    require_tensorflow()
    settings = Settings()
    process.remember_program()
    quiet_engines(settings.log_level)
    return settings


def _current_launch(settings: Settings, comm: object = None) -> Launch:
    """Return how this process was launched; in an elastic job, the launch of its last generation."""
    link = this_process().link
    if link is not None and settings.run_membership:
        return link.launch
    return detect_launch() if comm is None else launch_of(detect_launch(), comm)


def _start_services(session: Session, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None) -> None:
    from hvkeras.training.session_services import start_services  # noqa: PLC0415 - imports TensorFlow

    start_services(session, process_sets)


def init_for_strategy() -> Backend:
    """Join the job like `init()`, if not yet done, with an engine that hosts strategies.

    A job with another engine runs this one beside it.

    Returns:
        An engine that hosts strategies, or the job's own engine if there is only one process.

    Raises:
        HvkerasError: As for `init()`, or TensorFlow was used before.
    """
    name = backend_for_strategies()
    if not is_initialized():
        settings = _prepare()
        launch = _current_launch(settings)
        _start_services(open_session(launch, settings, name if launch.size > 1 else None))
    session, process = current_session(), this_process()
    if (session.topology.size == 1 or isinstance(session.backend, HostsStrategies) or session.control is None
            or session.hooks is None):
        return session.backend
    engine = process.engine(name)
    if engine not in session.hooks.backends:
        start_engine(session, engine)
    return engine


def init_without_engine() -> Session:
    """Join a job of several ranks like `init()`, but start no engine.

    `hvkeras bench` uses this to measure MPI alone, and training without communication.

    Returns:
        The session, whose backend does not communicate.

    Raises:
        UsageError: The launcher's environment variables cannot be read.
        MachineError: A port or launcher does not meet the requirements of the job.
        PeerError: A rank is missing or failed.
    """
    settings = Settings()
    quiet_engines(settings.log_level)
    return open_session(detect_launch(), settings, without_engine=True)


def shutdown() -> None:
    """Leave the job; all ranks may then call `init()` again.

    First the record is written and Keras restored (`stop_services`). Then the session closes its resources in reverse
    order, and finally its engine and hooks (`Session.close`). The control channel stays open until the process exits.
    """
    if not is_initialized():
        return
    from hvkeras.training.session_services import stop_services  # noqa: PLC0415 - imports TensorFlow

    stop_services()
    current_session().close()


exclude_from_autograph(__name__)


STRATEGY_TIMEOUT_MARGIN = 10  # seconds after the deadline of the control channel, which names ranks


def strategy(name: str, **options: Any) -> Strategy:
    """Build a `tf.distribute` strategy for the job of this process.

    Call it right after the imports, before TensorFlow creates its first tensor, variable or dataset.

    `multi_worker_mirrored` works under every launcher. All ranks connect as in `hvd.init()`, which is called if
    necessary. If a rank is missing, dies, is stopped or raises, all other ranks name it, and the job ends. The
    addresses come from TF_CONFIG if that launched the job; otherwise the ranks exchange them. Afterwards, all of
    hvkeras works alongside the strategy: `hvd.rank()`, `hvd.allreduce`, ...

    Example:
        strategy = hvd.strategy("multi_worker_mirrored")
        with strategy.scope():
            model = build()
            model.compile("adam", loss="mse")
        model.fit(dataset.batch(per_worker * strategy.num_replicas_in_sync))

    Args:
        name: `multi_worker_mirrored`: one model on all ranks, synchronous. `mirrored`: on all devices of this
            process; `hvd.DistributedOptimizer` or `hvd.DistributedGradientTape` then reduces between ranks.
            `parameter_server`: asynchronous, with the roles from TF_CONFIG; on the chief only. `tpu`: on TPUs.
        **options: `communication_options` (multi_worker_mirrored); `devices`, `cross_device_ops` (mirrored);
            `variable_partitioner` (parameter_server); `tpu`, `zone`, `project`, `device_assignment` (tpu). They are
            passed to the strategy's constructor, or to `TPUClusterResolver`.

    Returns:
        The strategy.

    Raises:
        UsageError: There is no such strategy or option, TensorFlow was used before, or the launcher does not support
            it.
        MachineError: There is no TPU, or another requirement of the job is not met.
        PeerError: A rank is missing or failed.
    """
    build = _BUILDERS.get(name)
    if build is None:
        raise UsageError(explain("The strategies are " + ", ".join(_BUILDERS), 'hvd.strategy("multi_worker_mirrored")',
                                 name=name))
    known = list(inspect.signature(build).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise UsageError(explain(f"The options of {name} are {', '.join(known)}", "leave it out", option=unknown[0]))
    strategy: Strategy = build(**options)
    return strategy


def _multi_worker_mirrored(communication_options: Any = None) -> Any:
    import tensorflow as tf

    engine = init_for_strategy()
    session = current_session()
    if session.topology.size > 1:
        from hvkeras.compat import patches  # noqa: PLC0415 - imports TensorFlow

        patches.install(patches.STEPS, _reported_step)
        # Steps of custom training loops are not reported, so the late rank of a collective is unknown. The timeout
        # prevents an endless wait.
        stalled = session.settings.stall_shutdown
        options = communication_options or tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=stalled + STRATEGY_TIMEOUT_MARGIN if stalled else None)
        assert isinstance(engine, HostsStrategies)
        return engine.strategy(communication_options=options)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication_options)


@contextlib.contextmanager
def _reported_step(step: str) -> Iterator[None]:
    """Report a Keras step of this rank to the control channel, which names a rank that does not reach it."""
    from hvkeras.job.plans import Plan  # noqa: PLC0415 - imports TensorFlow

    session = current_session() if is_initialized() else None
    if session is None or session.control is None:
        yield
        return
    label = f"{step} of fit" if step == "train_step" else f"{step} of an evaluation"
    plan = Plan("strategy", (), (), (), tuple(range(session.topology.size)), label, how=step)
    with session.entries.entering(plan, [], can_raise=False):
        yield


def _mirrored(devices: Any = None, cross_device_ops: Any = None) -> Any:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(devices, cross_device_ops)


def _parameter_server(variable_partitioner: Any = None) -> Any:
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        cluster, role = resolver.cluster_spec().as_dict(), resolver.task_type
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(explain(f"TF_CONFIG must be readable ({error})",
                                 f"write it like {EXAMPLE_WITH_SERVERS}")) from None
    missing = [wanted for wanted in ("chief", "worker", "ps") if not cluster.get(wanted)]
    if missing:
        raise UsageError(explain("ParameterServerStrategy takes its roles chief, worker and ps from TF_CONFIG alone,"
                                 " which no other launcher gives", f"start each task with a TF_CONFIG like"
                                 f" {EXAMPLE_WITH_SERVERS}", cluster=cluster, missing=missing))
    if role != "chief":
        hint = ("let it read the chief's checkpoints, without a strategy" if role == "evaluator" else
                "call hvd.parameter_server.train on every task; or, for a loop of your own, run there"
                " tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type,"
                " task_index=resolver.task_id).join()")
        raise UsageError(explain("Only the chief builds a ParameterServerStrategy; workers and ps serve it", hint,
                                 task=role))
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner)


def _tpu(tpu: Any = "", zone: Any = None, project: Any = None, device_assignment: Any = None) -> Any:
    import tensorflow as tf

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu, zone=zone, project=project)
        if tpu != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        raise MachineError(explain(f"A TPU must be available for the strategy tpu ({reason})", 'on a TPU machine, pass'
                                   ' tpu="local"; else the TPU\'s name; without a TPU, use "mirrored" or'
                                   ' "multi_worker_mirrored"', tpu=tpu)) from error
    return tf.distribute.TPUStrategy(resolver, device_assignment)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "multi_worker_mirrored": _multi_worker_mirrored,
    "mirrored": _mirrored,
    "parameter_server": _parameter_server,
    "tpu": _tpu,
}
