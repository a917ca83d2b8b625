"""`SyncBatchNormalization`: batch normalization over the combined batches of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Sum, members
from hvkeras.collectives.reductions import allreduce
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import global_process_set
from hvkeras.job.queries import rank
from hvkeras.typing import Tensor, TensorLike

if TYPE_CHECKING:

    class SyncBatchNormalization(Any):  # type: ignore[misc]  # Keras ships no types
        """What type checkers see of the class that `sync_batch_normalization` makes."""

        def __init__(
            self, fused: Literal[False] = False, *, axis: int | Sequence[int] = -1, momentum: float = 0.99,
            epsilon: float = 0.001, center: bool = True, scale: bool = True, **kwargs: Any,
        ) -> None: ...

        def __call__(self, inputs: TensorLike, *args: Any, **kwargs: Any) -> Tensor: ...  # noqa: D102 - Keras's


def sync_batch_normalization() -> Any:
    """Returns `SyncBatchNormalization` for the Keras in use: Keras 3, or tf_keras under TF_USE_LEGACY_KERAS."""
    return _class_for(compat.default_keras())


@functools.cache
def _class_for(keras: Any) -> Any:
    synchronized = _KerasMoments if compat.is_keras_3(keras) else _TfKerasMoments

    class SyncBatchNormalization(synchronized, keras.layers.BatchNormalization):  # type: ignore[misc,valid-type]
        """Batch normalization that, in training, uses the mean and variance over the batches of all ranks.

        Ranks are weighted by their number of samples, so the result is that of one process on the whole batch.

        Example:
            model = keras.Sequential([keras.layers.Dense(64), hvd.SyncBatchNormalization(), keras.layers.ReLU()])

        Args:
            fused: Horovod's parameter; only False is supported.
            **kwargs: As for `BatchNormalization`.

        Raises:
            UsageError: `fused` is not False.
            NotInitializedError: The layer is called before `init()`.
        """

    return keras.utils.register_keras_serializable("hvkeras")(SyncBatchNormalization)


class _KerasMoments:
    """Moments over all ranks in Keras 3."""

    over_ranks = True  # the moving statistics cover all ranks

    def __init__(self, fused: Any = False, **kwargs: Any) -> None:
        _require_unfused(fused)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)  # type: ignore[misc]  # the layer's
        return _over_ranks(inputs, mask, mean, variance)


class _TfKerasMoments:
    """Moments over all ranks in tf_keras, which computes them elsewhere if it is fused."""

    over_ranks = True

    def __init__(self, fused: Any = False, **kwargs: Any) -> None:
        _require_unfused(fused)
        super().__init__(fused=False, **kwargs)  # type: ignore[call-arg]  # the layer's

    def _moments(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, reduction_axes, keep_dims, mask=mask)  # type: ignore[misc]
        return _over_ranks(inputs, mask, mean, variance)


def _require_unfused(fused: Any) -> None:
    if fused is not False:
        raise UsageError(explain("SyncBatchNormalization cannot be fused", "leave out fused", fused=fused))


def _over_ranks(inputs: Any, mask: Any, mean: Any, variance: Any) -> tuple[Any, Any]:
    """Combines the moments of the ranks (Chan et al., 1979, "Updating formulae and a pairwise algorithm")."""
    ranks = members(global_process_set, "batch normalization")
    if len(ranks) == 1:
        return mean, variance
    number = tf.float64 if mean.dtype == tf.float64 else tf.float32
    channels = tf.size(mean)
    count = tf.cast(tf.size(inputs) // channels if mask is None else tf.math.count_nonzero(mask), number)
    moments = tf.concat([tf.reshape(tf.cast(part, number), [-1]) for part in (mean, variance)], axis=0)
    row = tf.concat([[count], tf.where(count > 0, moments, tf.zeros_like(moments))], axis=0)
    # Each rank adds its row to zeros: this gathers the rows, with a gradient that is a sum and a shape that is known.
    rows = allreduce(tf.pad(row[tf.newaxis], [[rank(), len(ranks) - 1 - rank()], [0, 0]]), op=Sum)
    shares = rows[:, :1] / tf.reduce_sum(rows[:, :1])
    means, variances = rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    whole = tf.reduce_sum(shares * means, axis=0)
    spread = tf.reduce_sum(shares * (variances + tf.square(means - whole)), axis=0)
    return (tf.reshape(tf.cast(whole, mean.dtype), tf.shape(mean)),
            tf.reshape(tf.cast(spread, variance.dtype), tf.shape(variance)))
