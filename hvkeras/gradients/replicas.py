"""Two levels at once: a strategy over the devices of each rank, and hvkeras between the ranks.

What the replicas of a rank have is summed by their strategy, as Keras's optimizers do themselves; the sum goes over
the ranks once, outside of the replicas, and comes back to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.job.state import current_job


def strategy_within_rank() -> Any:
    """The strategy in force if it reduces over devices of this rank alone, in a job of several ranks; else None.

    Raises:
        UnsupportedError: It compiles the step for TPUs, which reach no other rank's.
    """
    strategy = graphs.reducing_strategy()
    if strategy is None or graphs.spans_workers(strategy) or current_job().topology.size == 1:
        return None
    if isinstance(strategy, tf.distribute.TPUStrategy):
        raise UnsupportedError(explain("A TPUStrategy reduces over all its TPUs by itself, and cannot be one of several"
                                       " ranks", "start one process: the strategy connects to all TPUs of the slice",
                                       strategy=type(strategy).__name__, size=current_job().topology.size))
    return strategy


def reduce_over_both(gradients: Sequence[Any], over_ranks: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Sums gradients over the replicas of this rank, then reduces the sums over the ranks.

    Args:
        gradients: This replica's gradients, or those of the whole rank where no replica runs; None stays None.
        over_ranks: Reduces a rank's gradients over the ranks.

    Returns:
        The reduced gradients, the same on every replica.

    Raises:
        UsageError: The replicas cannot meet here, in a branch or function of their own.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return over_ranks(gradients)

    def meet(strategy: Any, summed: Sequence[Any]) -> list[Any]:
        return over_ranks([None if one is None else strategy.experimental_local_results(one)[0] for one in summed])

    try:
        return list(replica.merge_call(meet, args=(compat.sum_over_replicas(gradients),)))
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise UsageError(explain("Gradients must be reduced directly in the function that strategy.run() runs, since"
                                 " the replicas of a rank meet there",
                                 "take it out of tf.cond, loops and functions with a @tf.function of their own")
                         ) from error


def as_shares(reduced: Sequence[Any]) -> list[Any]:
    """Gives each replica an equal share, for an optimizer that sums over the replicas."""
    if tf.distribute.get_replica_context() is None:
        return list(reduced)
    count = tf.distribute.get_strategy().num_replicas_in_sync

    def share(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(share(gradient.values), gradient.indices, gradient.dense_shape)
        return None if gradient is None else gradient / tf.cast(count, gradient.dtype)

    return [share(gradient) for gradient in reduced]


def require_servable(strategy: Any, optimizer: Any, passes: int) -> None:
    """Makes sure that an optimizer can serve the replicas of a strategy within each rank.

    Args:
        strategy: The strategy.
        optimizer: The distributed optimizer.
        passes: Its `backward_passes_per_step`.

    Raises:
        UnsupportedError: It cannot.
    """
    received = {"strategy": type(strategy).__name__, "optimizer": type(optimizer).__name__}
    if passes > 1:
        raise UnsupportedError(explain("backward_passes_per_step must be 1 under a strategy within each rank",
                                       "use gradient_accumulation_steps of Keras's optimizer, or larger batches",
                                       backward_passes_per_step=passes, **received))
    if not compat.sums_once(optimizer):
        raise UnsupportedError(explain("An optimizer under a strategy within each rank must be of a Keras 3 that sums"
                                       " gradients over replicas", "use Keras 3, and its optimizers", **received))
