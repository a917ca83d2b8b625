"""`tf.data` pipelines in which each rank computes its rows only: batches are cut before their elements are mapped.

A pipeline such as `paths.shuffle(1000).map(load).batch(32).prefetch(1)` is rebuilt. Every rank reads and shuffles all
elements, but maps only those that it computes: `paths.shuffle(1000).batch(32).map(cut).unbatch().map(load).batch(16)
.prefetch(1)`. A map before a shuffle is moved behind it, which changes nothing if its result depends on its element
only. All of this is done only where it is provably the same: for known stages, functions without state, and elements
of equal shapes. A map that draws random numbers in parallel is the exception: they are as random as in one process,
which does not draw the same ones twice, either. Of other pipelines, ranks compute whole batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.data import pipeline
from hvkeras.data.shuffles import AGAIN, shuffled_again
from hvkeras.global_batch.marks import mark_of
from hvkeras.job.session import current_session, this_process
from hvkeras.partition.layouts import Division
from hvkeras.partition.sizes import rows
from hvkeras.partition.units import Units


@dataclass(frozen=True)
class Cut:
    """Rows of a batch that a rank computes, as in `hvkeras.partition.units`.

    Attributes:
        first: The first row.
        rows: The number of rows, at least one if there are any.
        counted: The number of rows that count: those that no other rank computes.
        total: The number of rows of the batch, an int64 scalar.
    """

    first: Any
    rows: Any
    counted: Any
    total: Any

    def of(self, batch: Any) -> Any:
        """Return the rows, in the structure of the batch."""
        return tf.nest.map_structure(lambda leaf: leaf[self.first : self.first + self.rows], batch)


def cut_of(total: Any) -> Cut:
    """Return the rows of this rank, of a number of rows."""
    topology = current_session().topology
    total = tf.cast(total, tf.int64)
    units = Units(topology.rank, topology.size)
    units.set_total("rows", total)
    division = Division("rows", rows("rows"))
    return Cut(units.first(division), units.own(division), units.counted(division), total)


def _own_rows(total: int) -> int:
    """Return how many rows this rank computes, of a constant number."""
    topology = current_session().topology
    return max(total // topology.size + (topology.rank < total % topology.size), min(total, 1))


def rebuilt(dataset: Any, of_arrays: bool) -> Any:
    """Return a dataset of this rank's rows; None if it is not provably the same.

    Args:
        dataset: A dataset of batches.
        of_arrays: Whether Keras has made it from arrays.

    Returns:
        A dataset whose elements are the rows in the structure of the batch, the number of all rows, and the mark of the
        batch (see `mark_of`).
    """
    if not all(type(spec) is tf.TensorSpec and spec.shape.rank for spec in tf.nest.flatten(dataset.element_spec)):
        return None
    with graphs.unconverted():
        return _rebuilt(dataset, of_arrays)


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


class Replacements:
    """Shuffling stages of pipelines, and what replaces them.

    A stage shuffles differently each time that it is iterated. So a stage is replaced only before that, always by the
    same one, and that one is iterated as often.
    """

    def __init__(self) -> None:
        self._iterated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._is_noting = False

    def note_iterated(self, dataset: Any, is_replaced: bool) -> None:
        """Note that a dataset is iterated; iterate the others of each pair, which must shuffle as often.

        Args:
            dataset: The dataset.
            is_replaced: Whether one with replacements is iterated, not the dataset itself.
        """
        if self._is_noting:
            return
        if pipeline.stage_name(dataset) == "Shuffle":
            self._iterated.add(dataset)
            if (replacement := self._replaced.get(dataset)) is not None:
                self._is_noting = True
                iter(dataset if is_replaced else replacement)
                self._is_noting = False
                return
        for source in pipeline.inputs(dataset):
            self.note_iterated(source, is_replaced)

    def of(self, stage: Any, inner: Any) -> Any:
        """Return the replacement of a shuffling stage, of the dataset `inner`.

        Returns:
            The replacement; None if the stage was iterated before, or follows another one that shuffles.
        """
        if stage not in self._replaced and stage not in self._iterated and not any(
                pipeline.stage_name(other) == "Shuffle" for other in pipeline.stages(stage)[1:]):
            self._replaced[stage] = shuffled_again(stage, inner, (stage._seed, stage._seed2))
        return self._replaced.get(stage)


def replacements() -> Replacements:
    """Return this process's `Replacements`."""
    return this_process().part(Replacements)


def _shuffled_again(stage: Any, inner: Any) -> Any:
    return replacements().of(stage, inner)


def _weighted_again(stage: Any, inner: Any) -> Any:
    function = stage._map_func._func
    return inner.map(lambda rows, total, mark: (_called(graphs.converted(function), rows), total, mark))


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


def _cut_indices(stage: Any) -> Any:
    """Cut the indices of a batch, by which Keras gathers the rows of arrays."""
    sources = pipeline.inputs(stage)
    spec = sources[0].element_spec
    if not (isinstance(spec, tuple) and isinstance(spec[0], tf.TensorSpec) and spec[0].shape.rank == 1):
        return None
    function = stage._map_func._func

    def gathered(indices: Any, arrays: Any) -> Any:
        cut = cut_of(tf.shape(indices, tf.int64)[0])
        # In another order, the first index of some batch is another one.
        mark = tf.stack([tf.cast(indices[0], tf.float64), tf.constant(1.0, tf.float64)])
        own = cut.of(indices)
        own.set_shape([None if indices.shape[0] is None else _own_rows(indices.shape[0])])
        return function(own, arrays), cut.total, mark

    return sources[0].map(gathered, num_parallel_calls=tf.data.AUTOTUNE)


def _cut_elements(stage: Any) -> Any:
    """Map and batch this rank's elements only."""
    lazy, size = _lazy(pipeline.inputs(stage)[0]), int(stage._batch_size)
    elements = lazy.dataset
    is_same = not lazy.draws or lazy.in_parallel
    if not lazy.functions or not is_same or not pipeline.have_equal_shapes(elements.element_spec):
        return None
    count, batches = int(elements.cardinality()), int(stage.cardinality())
    is_full = stage._drop_remainder or count == tf.data.INFINITE_CARDINALITY or (count >= 0 and count % size == 0)
    is_tuple = isinstance(elements.element_spec, tuple)

    def cut_batch(*batch: Any) -> Any:
        value = batch if is_tuple else batch[0]
        leaves = tf.nest.flatten(value)
        cut = cut_of(tf.shape(leaves[0], tf.int64)[0])
        about = tf.tile(tf.concat([mark_of(leaves), [tf.cast(cut.total, tf.float64)]], 0)[None], [cut.rows, 1])
        return cut.of(value), about

    def mapped(element: Any, about: Any) -> Any:
        return lazy.compute(element), about

    def described(rows: Any, about: Any) -> Any:
        return rows, tf.cast(about[0, 2], tf.int64), about[0, :2]

    own = elements.batch(size, drop_remainder=is_full).map(cut_batch).unbatch()
    own = own.map(mapped, num_parallel_calls=tf.data.AUTOTUNE if lazy.in_parallel else None)
    result = own.batch(_own_rows(size), drop_remainder=is_full).map(described)
    if batches != tf.data.UNKNOWN_CARDINALITY:
        result = result.apply(tf.data.experimental.assert_cardinality(batches))
    result = result.with_options(stage.options())
    return result if _is_same(result.element_spec[0], stage.element_spec) else None


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
        inner, function = _lazy(sources[0]), graphs.traced(dataset._map_func)
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
    result = function(*element) if type(element) is tuple else function(element)
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
