"""`tf.data` pipelines in which each rank computes its rows only: batches are cut before their elements are mapped.

A pipeline such as `paths.shuffle(1000).map(load).batch(32).prefetch(1)` is rebuilt. Every rank reads and shuffles all
elements, but maps only those that it computes: `paths.shuffle(1000).batch(32).map(cut).unbatch().map(load).batch(16)
.prefetch(1)`. A map before a shuffle is moved behind it, which changes nothing if its result depends on its element
only. All of this is done only where it is provably the same: for known stages, functions without state, and elements
of equal shapes. Other pipelines stay as they are, and the step cuts their batches.

The batches of a rebuilt pipeline are packed with their numbers of rows, see `Packed`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.data import pipeline
from hvkeras.data.shuffles import AGAIN
from hvkeras.global_batch.marks import Mark, mark_of
from hvkeras.global_batch.noise import drawing_as, drawing_for_rank
from hvkeras.global_batch.rows import Block, bounds, cut, cut_zipped
from hvkeras.job.session import current_session, this_process

_PACKED = "hvkeras_rows"


@dataclass(frozen=True)
class Packed:
    """Rows of a batch that a pipeline has cut, and what is known of the whole batch.

    Attributes:
        rows: This rank's rows, in the structure of the batch.
        block: Which rows these are.
        mark: Mark of all elements up to this batch; None if ranks get different parts of it.
    """

    rows: Any
    block: Block
    mark: Mark | None


def packed(batch: Any) -> Packed | None:
    """Return the rows of a batch of a rebuilt pipeline; None for other batches."""
    if not isinstance(batch, dict) or _PACKED not in batch:
        return None
    topology = current_session().topology
    if "of" in batch:
        block = bounds(int(batch["of"].shape[0]), topology.rank, topology.size)
    else:
        block = Block(0, *tf.unstack(batch["numbers"]))
    return Packed(batch[_PACKED], block, Mark(*tf.unstack(batch["mark"])))


def rows_in_spec(spec: Any) -> int | None:
    """Return the number of rows of all batches of a dataset, given their type specification; None if it varies."""
    if isinstance(spec, dict) and _PACKED in spec:
        return int(spec["of"].shape[0]) if "of" in spec else None
    shapes = [one.shape for one in tf.nest.flatten(spec) if getattr(getattr(one, "shape", None), "rank", None)]
    found: int | None = shapes[0][0] if shapes else None
    return found


def _pack(rows: Any, block: Block, mark: Mark) -> dict[str, Any]:
    if isinstance(block.total, int):  # a constant number of rows is a part of the type
        numbers = {"of": tf.zeros([block.total, 0], tf.int8)}
    else:
        numbers = {"numbers": tf.stack([tf.cast(one, tf.int64) for one in (block.rows, block.counted, block.total)])}
    return {_PACKED: rows, "mark": tf.stack([mark.value, mark.scale]), **numbers}


def rebuilt(dataset: Any, of_arrays: bool) -> Any:
    """Return a dataset of packed batches; None if it is not provably the same.

    Args:
        dataset: A dataset of batches.
        of_arrays: Whether Keras has made it from arrays.
    """
    with graphs.unconverted():
        found = _rebuilt(dataset, of_arrays)
        return _cut_zipped(dataset) if found is None and pipeline.zipped_batches(dataset) else found


def _rebuilt(dataset: Any, of_arrays: bool) -> Any:
    stage, inputs = pipeline.stage_name(dataset), pipeline.inputs(dataset)
    if stage in ("Batch", "ParallelBatch"):
        return _cut_elements(dataset)
    if stage in ("Map", "ParallelMap") and of_arrays:
        return _cut_indices(dataset)
    again = _AGAIN.get(stage)
    if stage in ("Map", "ParallelMap") and pipeline.is_class_weighting(dataset):
        again = _weighted_again
    inner = _rebuilt(inputs[0], of_arrays) if again is not None and len(inputs) == 1 else None
    return None if inner is None or again is None else again(dataset, inner)


class Iterated:
    """Shuffling stages of pipelines: which were iterated, and what replaces the others.

    A stage shuffles differently each time that it is iterated. So a stage is replaced only before that, and always by
    the same stage.
    """

    def __init__(self) -> None:
        self._iterated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def iterate(self, original: Callable[..., Any], iterator: Any, dataset: Any = None, *args: Any,
                **kwargs: Any) -> None:
        """Note that a dataset is iterated."""
        if dataset is not None:
            for stage in pipeline.stages(dataset):
                if pipeline.stage_name(stage) == "Shuffle":
                    self._iterated.add(stage)
        original(iterator, dataset, *args, **kwargs)

    def again(self, stage: Any, inner: Any) -> Any:
        """Return the replacement of a shuffling stage, of the dataset `inner`; None if it was iterated."""
        if stage not in self._replaced and stage not in self._iterated:
            with drawing_as((int(stage._seed), int(stage._seed2))):
                self._replaced[stage] = inner.shuffle(
                    int(stage._buffer_size), reshuffle_each_iteration=stage._reshuffle_each_iteration)
        return self._replaced.get(stage)


def iterated() -> Iterated:
    """Return this process's `Iterated`."""
    return this_process().part(Iterated)


def _shuffled_again(stage: Any, inner: Any) -> Any:
    return iterated().again(stage, inner)


def _weighted_again(stage: Any, inner: Any) -> Any:
    function = stage._map_func._func
    return inner.map(lambda batch: {**batch, _PACKED: _called(function, batch[_PACKED])})


# Stages, and how they are applied again to another dataset.
_AGAIN: dict[str, Callable[[Any, Any], Any]] = {
    **{name: AGAIN[name] for name in ("Prefetch", "Repeat", "Take", "Skip", "Options")},
    "Shuffle": _shuffled_again,
}


def without_prefetching(dataset: Any) -> Any:
    """Return the dataset before stages that prefetch; None if there are none."""
    found = dataset
    while pipeline.stage_name(found) in ("Prefetch", "Options"):
        found = pipeline.inputs(found)[0]
    return None if found is dataset else found


def _cut_zipped(dataset: Any) -> Any:
    """Cut batches of zipped datasets, whose numbers of rows may differ."""
    topology, is_tuple = current_session().topology, isinstance(dataset.element_spec, tuple)

    def packed_rows(*batch: Any) -> Any:
        value = batch if is_tuple else batch[0]
        rows, block = cut_zipped(value, topology.rank, topology.size)
        return _pack(rows, block, mark_of(tf.nest.flatten(value)))

    return dataset.map(packed_rows)


def _cut_indices(stage: Any) -> Any:
    """Cut the indices of a batch, by which Keras gathers the rows of arrays."""
    sources = pipeline.inputs(stage)
    spec = sources[0].element_spec
    if not (isinstance(spec, tuple) and isinstance(spec[0], tf.TensorSpec) and spec[0].shape.rank == 1):
        return None
    function, topology = stage._map_func._func, current_session().topology

    def gathered(indices: Any, arrays: Any) -> Any:
        total = tf.shape(indices, tf.int64)[0] if indices.shape[0] is None else indices.shape[0]
        block = bounds(total, topology.rank, topology.size)
        # In another order, the first index of some batch is another one.
        mark = Mark(tf.cast(indices[0], tf.float64), tf.constant(1.0, tf.float64))
        return _pack(function(cut(indices, block), arrays), block, mark)

    return sources[0].map(gathered, num_parallel_calls=tf.data.AUTOTUNE)


def _cut_elements(stage: Any) -> Any:
    """Map and batch this rank's elements only."""
    lazy, size = _lazy(pipeline.inputs(stage)[0]), int(stage._batch_size)
    elements = lazy.dataset
    if not lazy.functions or not pipeline.have_equal_shapes(elements.element_spec):
        return None
    count, batches = int(elements.cardinality()), int(stage.cardinality())
    is_full = stage._drop_remainder or count == tf.data.INFINITE_CARDINALITY or (count >= 0 and count % size == 0)
    topology, is_tuple = current_session().topology, isinstance(elements.element_spec, tuple)

    def cut_batch(*batch: Any) -> Any:
        value = batch if is_tuple else batch[0]
        leaves = tf.nest.flatten(value)
        total = size if is_full else tf.shape(leaves[0], tf.int64)[0]
        block, mark = bounds(total, topology.rank, topology.size), mark_of(leaves)
        about = {"mark": tf.stack([mark.value, mark.scale])}
        if not is_full:
            about["total"] = total
        return cut(value, block), tf.nest.map_structure(
            lambda one: tf.broadcast_to(one, tf.concat([[block.rows], tf.cast(tf.shape(one), tf.int64)], 0)), about)

    def mapped(element: Any, about: Any) -> Any:
        return lazy.compute(element), about

    def pack(rows: Any, about: Any) -> Any:
        block = bounds(size if is_full else about["total"][0], topology.rank, topology.size)
        return _pack(rows, block, Mark(*tf.unstack(about["mark"][0])))

    rows = bounds(size, topology.rank, topology.size).rows
    own = elements.batch(size, drop_remainder=is_full).map(cut_batch).unbatch()
    with drawing_for_rank():
        own = own.map(mapped, num_parallel_calls=tf.data.AUTOTUNE if lazy.in_parallel else None)
    result = own.batch(rows, drop_remainder=is_full).map(pack)
    if batches != tf.data.UNKNOWN_CARDINALITY:
        result = result.apply(tf.data.experimental.assert_cardinality(batches))
    result = result.with_options(stage.options())
    return result if _is_same(result.element_spec[_PACKED], stage.element_spec) else None


@dataclass(frozen=True)
class _Lazy:
    """Dataset whose elements are still to be mapped.

    Attributes:
        functions: Functions to map them by, in order; each takes and returns an element.
        in_parallel: Whether the user maps in parallel.
        draws: Whether a function draws random numbers, so that its elements must keep their order.
    """

    dataset: Any
    functions: Sequence[Callable[[Any], Any]] = ()
    in_parallel: bool = False
    draws: bool = False

    def compute(self, element: Any) -> Any:
        for function in self.functions:
            element = function(element)
        return element


def _lazy(dataset: Any) -> _Lazy:
    """Return the stages before the maps of a pipeline, and the maps."""
    stage, sources = pipeline.stage_name(dataset), pipeline.inputs(dataset)
    whole = _Lazy(dataset)
    if stage in ("Map", "ParallelMap"):
        state = pipeline.state_of(dataset)
        if state is None:
            return whole
        inner, function = _lazy(sources[0]), dataset._map_func._func
        return _Lazy(inner.dataset, (*inner.functions, lambda element: _called(function, element)),
                     inner.in_parallel or stage == "ParallelMap", inner.draws or state)
    if stage == "Zip":
        parts = [_lazy(source) for source in sources]
        if not any(part.functions for part in parts) or not isinstance(dataset._datasets, tuple):
            return whole

        def compute(element: Any) -> Any:
            return tuple(part.compute(one) for part, one in zip(parts, element, strict=True))

        if len(dataset._datasets) != len(parts):
            return whole
        return _Lazy(tf.data.Dataset.zip(tuple(part.dataset for part in parts)), (compute,),
                     any(part.in_parallel for part in parts), any(part.draws for part in parts))
    if stage in _AGAIN and len(sources) == 1:
        inner = _lazy(sources[0])
        if not inner.functions or (stage == "Shuffle" and inner.draws):
            return whole
        again = _AGAIN[stage](dataset, inner.dataset)
        return whole if again is None else _Lazy(again, inner.functions, inner.in_parallel, inner.draws)
    return whole


def _called(function: Any, element: Any) -> Any:
    """Call a function of a map on an element, as `tf.data` does."""
    converted = graphs.converted(function)
    result = converted(*element) if type(element) is tuple else converted(element)
    return tuple(result) if type(result) is list else result


def _is_same(cut_spec: Any, spec: Any) -> bool:
    """Return whether batches have the same structure, dtypes and shapes, except for their numbers of rows."""
    try:
        tf.nest.assert_same_structure(cut_spec, spec)
    except (TypeError, ValueError):
        return False
    pairs = zip(tf.nest.flatten(cut_spec), tf.nest.flatten(spec), strict=True)
    return all(type(one) is type(other) and one.dtype == other.dtype and one.shape.rank == other.shape.rank
               and (not one.shape.rank or one.shape[1:].as_list() == other.shape[1:].as_list())
               for one, other in pairs)
