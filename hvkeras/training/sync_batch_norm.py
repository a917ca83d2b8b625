"""Batch normalization over the batches of all ranks: `SyncBatchNormalization`, and Keras's `synchronized=True`.

Keras's own flag has an effect only under a `tf.distribute` strategy, which reduces over the devices of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Sum, members
from hvkeras.collectives.reductions import allreduce
from hvkeras.errors import UsageError, explain
from hvkeras.gradients import replicas
from hvkeras.gradients.weighting import joining
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.queries import rank
from hvkeras.job.session import current_session
from hvkeras.typing import Tensor, TensorLike

if TYPE_CHECKING:

    class SyncBatchNormalization(Any):  # type: ignore[misc]  # Keras ships no types
        """Type of the class that `sync_batch_normalization` returns."""

        def __init__(
            self, fused: Literal[False] = False, *, axis: int | Sequence[int] = -1, momentum: float = 0.99,
            epsilon: float = 0.001, center: bool = True, scale: bool = True, **kwargs: Any,
        ) -> None: ...

        def __call__(self, inputs: TensorLike, *args: Any, **kwargs: Any) -> Tensor: ...  # noqa: D102 - Keras's


def sync_batch_normalization() -> Any:
    """Return `SyncBatchNormalization` for the Keras in use: Keras 3, or tf_keras under TF_USE_LEGACY_KERAS."""
    return class_for(compat.default_keras())


@functools.cache
def class_for(keras: Any) -> Any:
    """Return the `SyncBatchNormalization` of a Keras."""

    class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # Keras ships no types
        """Batch normalization that, in training, uses the mean and variance over the batches of all ranks.

        Ranks are weighted by their number of samples, so the result is that of one process on the whole batch. In a job
        of several ranks, it is Keras's `BatchNormalization(synchronized=True)`.

        Example:
            model = keras.Sequential([keras.layers.Dense(64), hvd.SyncBatchNormalization(), keras.layers.ReLU()])

        Args:
            fused: Horovod's parameter; only False is supported.
            **kwargs: As for `BatchNormalization`.

        Raises:
            UsageError: `fused` is not False.
            NotInitializedError: The layer is called before `init()`.
        """

        def __init__(self, fused: Any = False, **kwargs: Any) -> None:
            if fused is not False:
                raise UsageError(explain("SyncBatchNormalization cannot be fused", "leave out fused", fused=fused))
            super().__init__(**{**kwargs, "synchronized": True})

        def _moments(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            # Keras's own synchronization subtracts large numbers from each other, for a single replica as well.
            with compat.attribute(self, "synchronized", current_session().topology.size > 1):
                moments: tuple[Any, Any] = super()._moments(*args, **kwargs)
                return moments

    return keras.utils.register_keras_serializable("hvkeras")(SyncBatchNormalization)


def moments_over_ranks(inputs: Any, axes: Sequence[int], keep_dims: bool, mask: Any,
                       process_set: ProcessSet) -> tuple[Any, Any]:
    """Compute the mean and variance over the batches of all ranks, with the gradients of one process.

    Args:
        inputs: The batch of this rank; under a strategy within each rank, of one device.
        keep_dims: Whether the results keep these axes, with length 1.
        mask: The samples to include, one axis shorter than `inputs`; None for all.
    """
    ranks = members(process_set, "batch normalization")
    total: Callable[[Any], Any] = functools.partial(allreduce, op=Sum, process_set=process_set)
    dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
    counts, *mean_and_variance = _moments(tf.cast(inputs, dtype), axes, mask)
    if joining().active:
        weight = tf.cast(joining().weight(), counts.dtype)
        counts, total = counts * weight, _with_weighted_gradient(total, weight)
    moments = tf.stack([tf.reshape(one, [-1]) for one in (counts, *mean_and_variance)])
    if (strategy := replicas.strategy_within_rank()) is not None:
        replica = tf.distribute.get_replica_context()
        moments = _combine_moments(moments, compat.number_of_replica(), strategy.num_replicas_in_sync,
                                   functools.partial(replica.all_reduce, tf.distribute.ReduceOp.SUM))
        total = _once_for_all_replicas(total, strategy.num_replicas_in_sync)
    _, *combined = tf.unstack(_combine_moments(moments, ranks.index(rank()), len(ranks), total))
    mean, variance = (tf.reshape(tf.cast(one, inputs.dtype), counts.shape) for one in combined)
    return (mean, variance) if keep_dims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _moments(inputs: Any, axes: Sequence[int], mask: Any) -> tuple[Any, Any, Any]:
    """Return the numbers of samples, means and variances, with the reduced axes."""
    if mask is None:
        mean, variance = tf.nn.moments(inputs, axes, keepdims=True)
        count = tf.cast(tf.size(inputs) // tf.maximum(tf.size(mean), 1), inputs.dtype)
        return tf.fill(mean.shape, count), mean, variance
    unmasked = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    counts = tf.reduce_sum(tf.cast(unmasked, inputs.dtype), axes, keepdims=True)

    def mean_of(values: Any) -> Any:
        total = tf.reduce_sum(tf.where(unmasked, values, tf.zeros([], values.dtype)), axes, keepdims=True)
        return tf.math.divide_no_nan(total, counts)

    mean = mean_of(inputs)
    return counts, mean, mean_of(tf.square(inputs - mean))


def _combine_moments(moments: Any, index: int, parts: int, total: Callable[[Any], Any]) -> Any:
    """Combine the moments of parts (Chan et al., 1979, "Updating formulae and a pairwise algorithm").

    Args:
        moments: Numbers of samples, means and variances of this part, of shape `[3, channels]`.
        index: The index of this part.
        total: Sums a tensor over the parts.

    Returns:
        The moments of all parts together, of the same shape.
    """
    moments = tf.where(moments[:1] > 0, moments, tf.zeros([], moments.dtype))  # the mean of no samples may be NaN
    # The sum of rows padded with zeros gathers the rows, with a sum as gradient and a static shape.
    gathered = total(tf.pad(moments[tf.newaxis], [[index, parts - 1 - index], [0, 0], [0, 0]]))
    counts, means, variances = tf.unstack(gathered, axis=1)
    count = tf.reduce_sum(counts, axis=0)
    shares = tf.math.divide_no_nan(counts, count)
    mean = tf.reduce_sum(shares * means, axis=0)
    return tf.stack([count, mean, tf.reduce_sum(shares * (variances + tf.square(means - mean)), axis=0)])


def _with_weighted_gradient(total: Callable[[Any], Any], weight: Any) -> Callable[[Any], Any]:
    """Return a sum whose gradient scales this rank's loss by its weight in the step."""

    def weighted(tensor: Any) -> Any:
        summed = total(tensor)
        return weight * summed + tf.stop_gradient((1.0 - weight) * summed)

    return weighted


def _once_for_all_replicas(over_ranks: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    """Return a sum over the ranks for a tensor that all replicas of this rank hold, and its gradient."""

    def sum_once(tensor: Any) -> Any:
        share = tensor / tf.cast(count, tensor.dtype)
        return replicas.reduce_over_both([share], lambda summed: [over_ranks(summed[0])])[0]

    total: Callable[[Any], Any] = tf.custom_gradient(lambda tensor: (sum_once(tensor), sum_once))
    return total
