"""Two-level reduction: a strategy reduces over the devices of each rank, and hvkeras reduces over the ranks.

The strategy sums the gradients of a rank's replicas, as Keras optimizers do. The sum is reduced over the ranks once,
outside the replica context, and the result is returned to each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.job.session import current_session


def strategy_within_rank() -> Any:
    """Return the active strategy if it reduces only over this rank's devices in a multi-rank job; otherwise None.

    Raises:
        UnsupportedError: The strategy is a `TPUStrategy`, whose TPUs cannot communicate with those of other ranks.
    """
    strategy = graphs.reducing_strategy()
    if strategy is None or graphs.spans_workers(strategy) or current_session().topology.size == 1:
        return None
    if isinstance(strategy, tf.distribute.TPUStrategy):
        raise UnsupportedError(explain("A TPUStrategy must be used in a job of one rank, because it reduces over all"
                                       " TPUs", "start one process: the strategy connects to all TPUs of the slice",
                                       strategy=type(strategy).__name__, size=current_session().topology.size))
    return strategy


def refuse_shards(strategy: Any) -> None:
    """Raise UnsupportedError: an update cannot be sharded if each rank has several replicas."""
    raise UnsupportedError(explain("shard_update=True needs a model on one device of each rank",
                                   "remove it, or start a rank for each device", strategy=type(strategy).__name__))


def reduce_over_both(gradients: Sequence[Any], over_ranks: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Sum gradients over the replicas of this rank, then reduce the sums over the ranks.

    Args:
        gradients: This replica's gradients, or those of the rank outside a replica context; None stays None.
        over_ranks: Reduces a rank's gradients over the ranks.

    Returns:
        The reduced gradients, the same on every replica.

    Raises:
        UsageError: The call is inside a branch or a nested function, where the replicas cannot be synchronized.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return over_ranks(gradients)

    def reduce_over_ranks(strategy: Any, summed: Sequence[Any]) -> list[Any]:
        return over_ranks([None if gradient is None else strategy.experimental_local_results(gradient)[0]
                           for gradient in summed])

    try:
        return list(replica.merge_call(reduce_over_ranks, args=(compat.sum_over_replicas(gradients),)))
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise UsageError(explain("Gradients must be reduced directly in the function that strategy.run() runs, since"
                                 " the replicas of a rank synchronize there",
                                 "move it out of tf.cond, loops and nested functions with @tf.function")) from error


def as_shares(reduced: Sequence[Any]) -> list[Any]:
    """Divide reduced gradients by the number of replicas, for an optimizer that sums over the replicas."""
    if tf.distribute.get_replica_context() is None:
        return list(reduced)
    count = tf.distribute.get_strategy().num_replicas_in_sync

    def share(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(share(gradient.values), gradient.indices, gradient.dense_shape)
        return None if gradient is None else gradient / tf.cast(count, gradient.dtype)

    return [share(gradient) for gradient in reduced]


def require_servable(strategy: Any, optimizer: Any, passes: int) -> None:
    """Require that an optimizer supports a strategy within each rank.

    Args:
        passes: Its `backward_passes_per_step`.

    Raises:
        UnsupportedError: The optimizer does not support it.
    """
    received = {"strategy": type(strategy).__name__, "optimizer": type(optimizer).__name__}
    if passes > 1:
        raise UnsupportedError(explain("backward_passes_per_step must be 1 under a strategy within each rank",
                                       "use gradient_accumulation_steps of Keras's optimizer, or larger batches",
                                       backward_passes_per_step=passes, **received))
    if not compat.sums_once(optimizer):
        raise UnsupportedError(explain("An optimizer under a strategy within each rank must be from a version of Keras"
                                       " 3 that sums gradients over replicas", "use Keras 3, and its optimizers",
                                       **received))
