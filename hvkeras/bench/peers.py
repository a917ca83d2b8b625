"""Horovod, `tf.distribute` and MPI used directly, without hvkeras, in the same processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from hvkeras import compat
from hvkeras.backends.interface import Backend
from hvkeras.bench.ranks import BenchmarkRanks
from hvkeras.compat import patches
from hvkeras.host.mpi import mpi_world


@dataclass
class Peer:
    """A library that is used directly, without hvkeras.

    Attributes:
        engine: Description of the transport.
        reason: Why the library cannot participate, or "".
        reduce: Function of a tensor and a name that sums the tensor over the ranks.
        scope: Runs a function with arguments in a context where `reduce` works; None if it works anywhere.
        strategy: The `tf.distribute` strategy, if any.
        gradient: Computes a tape's gradients of a target with respect to variables, reduced over the ranks.
    """

    engine: str = ""
    reason: str = ""
    reduce: Callable[[Any, str], Any] = lambda tensor, _: tensor
    scope: Callable[..., Any] | None = None
    strategy: Any = None
    gradient: Callable[[Any, Any, Sequence[Any]], Sequence[Any]] | None = None


def direct(backend: Backend, ranks: BenchmarkRanks) -> Peer:
    """Return the job's engine, used without hvkeras.

    A process can start Horovod's core and TensorFlow's cluster only once. Therefore the peer uses those of hvkeras's
    backend.

    Returns:
        The peer, with the reason if it cannot participate.
    """
    peer = Peer()
    build = _horovod if backend.name == "horovod" else _tf_distribute
    _, peer.reason, _ = ranks.run_on_all(lambda: build(peer, backend, ranks))
    return peer


def mpi(ranks: BenchmarkRanks) -> Any:
    """Return an mpi4py communicator for all ranks; None if mpi4py is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    launch = ranks.session.launch
    return mpi_world(launch.launcher, launch.size, ranks.session.settings.start_timeout)


def _horovod(peer: Peer, backend: Backend, _: BenchmarkRanks) -> None:
    import horovod.tensorflow as horovod

    def reduce(tensor: Any, name: str) -> Any:
        return horovod.allreduce(tensor, op=horovod.Sum, name=f"alone_{name.replace(' ', '_')}")

    def gradient(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
        # Horovod supports TensorFlow variables, but not those of Keras 3.
        found: Sequence[Any] = horovod.DistributedGradientTape(tape).gradient(loss,
                                                                              [*map(compat.as_tf_variable, variables)])
        return found

    peer.engine, peer.reduce, peer.gradient = f"{backend.engine}, without hvkeras", reduce, gradient


def _tf_distribute(peer: Peer, backend: Backend, ranks: BenchmarkRanks) -> None:
    context = tf_context.context()
    cluster = tf.train.ClusterSpec(context._collective_ops_server_def.cluster)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=ranks.rank,
                                                                    rpc_layer="grpc")
    with patches.installed(patches.PEERS_SERVER):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    strategy.extended._stop_check_health_thread()

    def reduce(tensor: Any, _: str) -> Any:
        # tf.distribute reduces on the tensor's device. Function arguments have none, but the result of tf.identity has.
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor))

    def scope(function: Callable[..., Any], *arguments: Any) -> Any:
        return strategy.run(function, args=arguments)

    def gradient(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
        # The optimizer sums over replicas, so each one contributes its share of the mean.
        found: Sequence[Any] = tape.gradient(loss, variables, output_gradients=tf.constant(1.0 / ranks.size))
        return found

    peer.engine = f"{backend.engine}, by strategy.run and without hvkeras"
    peer.reduce, peer.scope, peer.strategy, peer.gradient = reduce, scope, strategy, gradient
