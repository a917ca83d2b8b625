"""Shares of datasets of which a rank maps only its own rows: `dataset.shuffle(1000).map(load).batch(32)`.

All ranks read and shuffle all elements, but each loads only its rows: elements are selected before they are mapped. In
a pipeline of batches, they are batched and split before they are mapped, and batched again afterwards. This is done
only if the rows are provably the same: for functions that depend on their element only, and batches of elements of
equal shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.compat.graphs import without_autograph
from hvkeras.data.partition import Partition
from hvkeras.data.pipeline import have_equal_shapes, inputs, stage_name, state_of
from hvkeras.data.shuffles import AGAIN, seeds_in

_MAPS = ("Map", "ParallelMap")


def split_before_maps(dataset: Any, partition: Partition) -> Any:
    """Return this rank's part of each batch, without parts that have no rows; None if it is not provably the same.

    The last part may have fewer rows. Its length is unknown.
    """
    after, stage = [], dataset
    while stage_name(stage) in ("Prefetch", "Options", "Repeat"):
        after.append(stage)
        stage = inputs(stage)[0]
    if stage_name(stage) not in ("Batch", "ParallelBatch"):
        return None
    maps, source = [], inputs(stage)[0]
    while stage_name(source) in _MAPS and _depends_on_element_only(source):
        maps.append(source)
        source = inputs(source)[0]
    rows, drops = int(stage._batch_size), bool(stage._drop_remainder)
    part = partition.part_size(rows)
    # In an evaluation, a rank may get more rows of the last batch than of the others, unless these are divisible.
    is_even = partition.training or rows % partition.size == 0
    if not maps or not part or not is_even or not have_equal_shapes(source.element_spec):
        return None

    def split(*batch: Any) -> Any:
        arrays = tf.nest.flatten(batch)
        start, stop = partition.part(rows if drops else tf.shape(arrays[0], tf.int64)[0])
        own = tf.nest.pack_sequence_as(batch, [array[start:stop] for array in arrays])
        return own if type(source.element_spec) is tuple else own[0]

    share = source.batch(rows, drops).map(without_autograph(split)).unbatch()
    for one in reversed(maps):
        share = AGAIN[stage_name(one)](one, share)
    share = AGAIN["Batch"](stage, share, part)
    for one in reversed(after):
        share = AGAIN[stage_name(one)](one, share)
    return share


def select_before_maps(dataset: Any, select: Callable[[Any], Any]) -> Any:
    """Apply `select`, which selects elements by their position, before the maps at the end of a pipeline.

    Each rank then maps only its own elements.
    """
    after, source = [], dataset
    while stage_name(source) in ("Prefetch", "Options") or (
            stage_name(source) in _MAPS and _depends_on_element_only(source)):
        after.append(source)
        source = inputs(source)[0]
    if not any(stage_name(stage) in _MAPS for stage in after):
        return select(dataset)
    share = select(source)
    for one in reversed(after):
        share = AGAIN[stage_name(one)](one, share)
    return share


def _depends_on_element_only(stage: Any) -> bool:
    """Return whether the results of a map depend on its element only, or on random numbers that ranks draw apart."""
    state = state_of(stage)
    return state is False or (state is True and set(seeds_in(stage._map_func)) == {(0, 0)})
