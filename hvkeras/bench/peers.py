"""Horovod, `tf.distribute` and MPI used directly, without hvkeras, in the same processes."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from hvkeras import compat
from hvkeras.backends.interface import Backend
from hvkeras.bench.ranks import Ranks


@dataclass
class Peer:
    """A library that is used as its own users do.

    Attributes:
        engine: What moves the bytes, in words.
        reason: Why it cannot take part, or "".
        reduce: Sums a tensor over the ranks, under a name.
        scope: Runs a function with arguments where `reduce` works; None where it works anywhere.
        strategy: The `tf.distribute` strategy, if it is one.
        gradient: Computes a tape's reduced gradients of a target by variables.
    """

    engine: str = ""
    reason: str = ""
    reduce: Callable[[Any, str], Any] = lambda tensor, _: tensor
    scope: Callable[..., Any] | None = None
    strategy: Any = None
    gradient: Callable[[Any, Any, Sequence[Any]], Sequence[Any]] | None = None


def direct(backend: Backend, ranks: Ranks) -> Peer:
    """The engine that serves the job, used without hvkeras.

    A process can run Horovod's core, and TensorFlow's cluster, only once. So a peer uses the one that the
    backend of hvkeras has started.

    Args:
        backend: The engine, Horovod's or TensorFlow's.
        ranks: The ranks.

    Returns:
        The peer, with the reason if it cannot take part.
    """
    peer = Peer()
    build = _horovod if backend.name == "horovod" else _tf_distribute
    _, peer.reason, _ = ranks.together(lambda: build(peer, backend, ranks))
    return peer


def mpi(ranks: Ranks) -> Any:
    """A communicator of mpi4py for all ranks; None where it is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    from hvkeras.host.mpi import mpi_world

    launch = ranks.job.launch
    return mpi_world(launch.launcher, launch.size, ranks.job.settings.start_timeout)


def _horovod(peer: Peer, backend: Backend, _: Ranks) -> None:
    import horovod.tensorflow as horovod

    def reduce(tensor: Any, name: str) -> Any:
        return horovod.allreduce(tensor, op=horovod.Sum, name=f"alone_{name.replace(' ', '_')}")

    def gradient(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
        # Horovod knows variables of TensorFlow, and not those of Keras 3.
        found: Sequence[Any] = horovod.DistributedGradientTape(tape).gradient(loss, [*map(compat.native, variables)])
        return found

    peer.engine, peer.reduce, peer.gradient = f"{backend.engine}, without hvkeras", reduce, gradient


def _tf_distribute(peer: Peer, backend: Backend, ranks: Ranks) -> None:
    context = tf_context.context()
    cluster = tf.train.ClusterSpec(context._collective_ops_server_def.cluster)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=ranks.rank,
                                                                    rpc_layer="grpc")
    with _server_is_up(context):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    strategy.extended._stop_check_health_thread()

    def reduce(tensor: Any, _: str) -> Any:
        # Arguments of a function have no device, by which tf.distribute knows where to reduce; an identity has one.
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor))

    def scope(function: Callable[..., Any], *arguments: Any) -> Any:
        return strategy.run(function, args=arguments)

    def gradient(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
        # The optimizer sums over replicas, so that each gives its part of the mean.
        found: Sequence[Any] = tape.gradient(loss, variables, output_gradients=tf.constant(1.0 / ranks.size))
        return found

    peer.engine = f"{backend.engine}, by strategy.run and without hvkeras"
    peer.reduce, peer.scope, peer.strategy, peer.gradient = reduce, scope, strategy, gradient


@contextlib.contextmanager
def _server_is_up(context: Any) -> Iterator[None]:
    """Lets a strategy find TensorFlow's server, which tfdist has started, instead of starting another."""
    names = ("configure_collective_ops", "configure_coordination_service", "enable_collective_ops")
    for name in names:
        setattr(context, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            delattr(context, name)
