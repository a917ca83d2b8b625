"""Steps of `fit`, `evaluate` and `predict`: each rank computes its rows of the batch, and all ranks get all results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.collectives.operations import Sum
from hvkeras.collectives.reductions import allgather, allreduce
from hvkeras.collectives.row_share import RowShare, global_batch
from hvkeras.compat import graphs
from hvkeras.global_batch.marks import mark_of
from hvkeras.global_batch.pipelines import Packed, packed, rows_in_spec
from hvkeras.global_batch.rows import Block, block_of, bounds, cut
from hvkeras.global_batch.states import Changes
from hvkeras.global_batch.whole_batch import gathering_metrics
from hvkeras.gradients.weighting import joining
from hvkeras.job.session import current_session


class StepChanges:
    """Changes of variables in the step that is being traced or run, for the functions that Keras calls in it."""

    def __init__(self) -> None:
        self.current: Changes | None = None


def cutting(step: Callable[[Any], Any], model: Any, trains: bool, reduces: bool, changes: StepChanges,
            cuts_constants: bool = False) -> Callable[[Any], Any]:
    """Return a training or test step that computes this rank's rows, and leaves the state of one process.

    Args:
        step: Keras's or the user's step: takes a batch, and returns logs.
        trains: Whether it is a training step.
        reduces: Whether gradients are reduced where a tape computes them, since the step is the user's.
        changes: Gets the changes of variables while the step runs.
        cuts_constants: Whether tensors that the step makes for a constant number of rows, that of the whole batch, are
            made for this rank's rows.
    """

    @functools.wraps(step)
    @graphs.without_autograph
    def cut_step(batch: Any) -> Any:
        own = _own(batch)
        if own is None:
            return step(batch)
        rows = own.block.share(trains, reduces, cuts_constants)
        outer, changes.current = changes.current, Changes(getattr(model, "optimizer", None))
        try:
            with global_batch().computing(rows), gathering_metrics(model, changes.current):
                logs = step(own.rows)
            return changes.current.merge(model, logs, rows, own.mark)
        finally:
            changes.current = outer

    return cut_step


def predicting(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a prediction step that computes this rank's rows, and returns those of all ranks.

    Outputs that are not made of rows, or cannot be gathered, are computed from all rows on every rank.
    """

    @functools.wraps(step)
    @graphs.without_autograph
    def cut_step(batch: Any) -> Any:
        own = _own(batch) if global_batch().whole else None
        if own is None:
            return step(batch)
        with global_batch().computing(own.block.share(trains=False, reduces=False)):
            outputs = step(own.rows)
        if not all(_can_be_gathered(output) for output in tf.nest.flatten(outputs)):
            return step(whole(batch))
        return tf.nest.map_structure(lambda output: _gathered(output, own.block), outputs)

    return cut_step


def _own(batch: Any) -> Packed | None:
    """Return this rank's rows of a batch; None if it has no rows."""
    found = packed(batch)
    if found is not None:
        return found
    batch = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf,
                                  batch)
    if not global_batch().whole:
        return _own_part(batch)
    leaves, topology = tf.nest.flatten(batch), current_session().topology
    block = block_of(leaves, topology.rank, topology.size)
    return None if block is None else Packed(cut(batch, block), block, mark_of(leaves))


def constant_rows(iterator: Any) -> RowShare | None:
    """Return the share of this rank's rows if all batches of an iterator have the same known number of rows."""
    spec, topology = iterator.element_spec, current_session().topology
    total = rows_in_spec(spec)
    if total is None or not global_batch().whole or topology.size == 1:
        return None
    return bounds(total, topology.rank, topology.size).share(trains=True, reduces=True)


def rows_of(batch: Any) -> Any:
    """Return this rank's rows of a batch."""
    own = _own(batch)
    return batch if own is None else own.rows


def _own_part(batch: Any) -> Packed | None:
    """Return a batch that is this rank's part of the batch of all ranks."""
    block = block_of(tf.nest.flatten(batch), 0, 1)
    if block is None:
        return None
    rows = tf.cast(block.total, tf.int64)
    if joining().active:  # a rank without a batch left repeats one
        rows *= tf.cast(joining().weight(), tf.int64)
    total = allreduce(rows, op=Sum, name="the number of rows")
    return Packed(batch, replace(block, counted=rows, total=total), None)


def whole(batch: Any) -> Any:
    """Return all rows of a batch; nothing if they cannot be gathered."""
    own = packed(batch) if global_batch().whole else _own(batch)
    if own is None:
        return batch
    if own.mark is None and not all(_can_be_gathered(leaf) for leaf in tf.nest.flatten(own.rows)):
        return ()
    has_rows = own.block.counted > 0
    return tf.nest.map_structure(lambda leaf: allgather(leaf[: tf.where(has_rows, tf.shape(leaf)[0], 0)],
                                                        name="the rows of a batch"), own.rows)


def _can_be_gathered(output: Any) -> bool:
    return isinstance(output, tf.Tensor) and output.shape.rank not in (0, None) and (
        output.dtype.is_floating or output.dtype.is_integer or output.dtype.is_bool or output.dtype.is_complex)


def _gathered(output: Any, block: Block) -> Any:
    rows = tf.cast(tf.shape(output)[0], tf.int64)
    check = tf.debugging.assert_equal(rows, tf.cast(block.rows, tf.int64), (
        "Predictions must have one row for each row of their batch. HINT: if they do not, predict on one rank"))
    with tf.control_dependencies([check] if check is not None else []):
        own = output[: block.counted]
    everyone = allgather(own, name="predictions")
    everyone.set_shape([block.total if isinstance(block.total, int) else None, *output.shape[1:]])
    return everyone
