"""Losses over all ranks: their average over the ranks is the loss of one process on all samples.

Gradients are averaged, which is correct if the loss is a mean over equally many samples on each rank. Losses with other
reductions are scaled accordingly before the gradient is computed, so that regularizers and other losses of the model
are unaffected (docs/decisions/losses-of-all-ranks.md):

- a sum is multiplied by the number of ranks;
- a mean over unmasked values, or one divided by the sum of weights, is multiplied by the number of ranks and by this
  rank's share of the total weight, which the ranks sum up in the step.

If ranks get whole elements of data with different numbers of rows, a plain mean is multiplied by the number of ranks
and by this rank's share of the values. Keras averages the losses of an epoch over the ranks by their rows. Therefore
the loss gets the value for which this average is that of one process, and keeps its gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvkeras.collectives.operations import Sum
from hvkeras.collectives.reductions import allreduce
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.weighting import joining
from hvkeras.job.process_sets import ProcessSet


class _Step:
    """Ranks whose losses are averaged in the current step; None outside of steps."""

    process_set: ProcessSet | None = None
    by_rows = False  # whether ranks may have different numbers of rows
    masked = False  # whether the loss that is being reduced is weighted by its mask


@contextlib.contextmanager
def averaged_over(process_set: ProcessSet | None, by_rows: bool = False) -> Iterator[None]:
    """Enter a scope in which reduced losses belong to a step whose gradients are averaged over these ranks.

    Args:
        process_set: The ranks; None for a step of this rank alone.
        by_rows: Whether ranks may have different numbers of rows, by which means are then weighted.
    """
    before = _Step.process_set, _Step.by_rows
    _Step.process_set, _Step.by_rows, _Step.masked = process_set, by_rows, False
    try:
        yield
    finally:
        _Step.process_set, _Step.by_rows = before


@graphs.without_autograph
def weigh_by_mask(weights: Any, mask: Any) -> Any:
    """Scale the weights of a mean over unmasked values.

    Args:
        mask: The mask, True for unmasked values.
    """
    if _Step.process_set is None or graphs.reducing_strategy() is not None:  # replicas cannot communicate
        return weights
    _Step.masked = True
    return weights * _share(tf.reduce_sum(tf.cast(mask, weights.dtype)), _Step.process_set)


@graphs.without_autograph
def combine(loss: Any, reduction: str, weights: Any, values: Any) -> Any:
    """Scale a reduced loss.

    Args:
        reduction: The reduction of Keras over the samples.
        weights: The sample weights, if any.

    Raises:
        UsageError: The loss is not reduced.
        UnsupportedError: Joined ranks without data participate, and the loss is not a plain mean over samples.
    """
    masked, _Step.masked = _Step.masked, False
    if _Step.process_set is None:
        return loss
    if reduction == "none":
        raise UsageError(explain("A loss that several ranks train on must be reduced to one number",
                                 'write reduction="sum_over_batch_size" or "sum"', reduction=None))
    can_communicate = graphs.reducing_strategy() is None  # replicas cannot communicate in a step
    scaled = loss
    if reduction == "sum":
        _require_data_on_all_ranks(reduction)
        scaled = loss * tf.cast(len(_Step.process_set.members()), loss.dtype)
    elif reduction == "mean_with_sample_weight" and weights is not None and can_communicate:
        scaled = loss * _share(tf.cast(tf.reduce_sum(weights), loss.dtype), _Step.process_set)
    elif not masked:
        if not _Step.by_rows or not can_communicate:
            return loss
        scaled = loss * tf.cast(_share(tf.cast(tf.size(values), tf.float32), _Step.process_set), loss.dtype)
        return _with_value(loss, scaled)
    if not _Step.by_rows or not can_communicate:
        return scaled
    factor = _share(tf.cast(tf.shape(values)[0], tf.float32), _Step.process_set)
    return _with_value(tf.math.divide_no_nan(scaled, tf.cast(factor, loss.dtype)), scaled)


def _with_value(value: Any, loss: Any) -> Any:
    """Return a loss with another value but the same gradient."""
    return value + (loss - value) - tf.stop_gradient(loss - value)


def _share(own: Any, process_set: ProcessSet) -> Any:
    """Return the factor for a mean whose weights sum to `own` here; 1 if the sums are equal on all ranks."""
    _require_data_on_all_ranks("mean by weight")
    total = allreduce(own, op=Sum, name="the weights of a loss", process_set=process_set)
    return tf.math.divide_no_nan(own * tf.cast(len(process_set.members()), own.dtype), total)


def _require_data_on_all_ranks(reduction: str) -> None:
    if joining().active:
        raise UnsupportedError(explain("HVKERAS_UNEVEN=join needs losses that are means over samples, without masks",
                                       'set HVKERAS_UNEVEN=trim, or write reduction="sum_over_batch_size"',
                                       reduction=reduction))
