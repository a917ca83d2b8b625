"""`strategy()`: builds the `tf.distribute` strategy that fits the job's launcher, in one call."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from hvkeras.backends.capabilities import HostsStrategies
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.job.session import current_session, is_initialized
from hvkeras.launch_environments.tf_config import EXAMPLE_WITH_SERVERS
from hvkeras.startup import init_for_strategy
from hvkeras.typing import Strategy

UNCOUNTED = 10  # seconds from the deadline of the control channel, which names ranks, to TensorFlow's own


def strategy(name: str, **options: Any) -> Strategy:
    """Builds a `tf.distribute` strategy for the job that this process belongs to.

    Call it right after the imports, before TensorFlow creates its first tensor, variable or dataset.

    `multi_worker_mirrored` works under every launcher. All ranks connect as in `hvd.init()`, which it calls if you have
    not. If a rank is missing, dies, is stopped or raises, all other ranks name it, and the job ends. The addresses come
    from TF_CONFIG if that launched the job; otherwise the ranks exchange them. Afterwards, all of hvkeras works
    alongside the strategy: `hvd.rank()`, `hvd.allreduce`, ...

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
        UsageError: There is no such strategy or option, TensorFlow was used before, or the launcher does not suit it.
        MachineError: There is no TPU, or the job lacks something else that it needs.
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

        patches.install(patches.STEPS, _counted)
        # Custom training loops are not counted, so nobody knows which rank a collective waits for. The timeout keeps
        # it from waiting forever.
        stalled = session.settings.stall_shutdown
        options = communication_options or tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=stalled + UNCOUNTED if stalled else None)
        assert isinstance(engine, HostsStrategies)
        return engine.strategy(communication_options=options)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication_options)


@contextlib.contextmanager
def _counted(step: str) -> Iterator[None]:
    """Reports a Keras step of this rank to the control channel, so that it can name a rank that does not reach it."""
    from hvkeras.plans import Plan  # noqa: PLC0415 - imports TensorFlow

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
        raise UsageError(explain("The chief alone builds a ParameterServerStrategy; workers and ps serve it", hint,
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
        why = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        raise MachineError(explain(f"A TPU must be available for the strategy tpu ({why})", 'on a TPU machine, pass'
                                   ' tpu="local"; else the TPU\'s name; without a TPU, use "mirrored" or'
                                   ' "multi_worker_mirrored"', tpu=tpu)) from error
    return tf.distribute.TPUStrategy(resolver, device_assignment)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "multi_worker_mirrored": _multi_worker_mirrored,
    "mirrored": _mirrored,
    "parameter_server": _parameter_server,
    "tpu": _tpu,
}
