"""Iterators over datasets: whose batches are cut early, and in whose batches all arrays have the same rows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.collectives.rounds import gathered
from hvkeras.compat import graphs
from hvkeras.data import pipeline
from hvkeras.global_batch.pipelines import cut_of, rebuilt, replacements
from hvkeras.job.session import current_session, this_process

# Stages behind a batch that neither change it nor join it with others.
_SAME_BATCH = {"AssertCardinality", "Cache", "Options", "Prefetch", "Repeat", "Shuffle", "Skip", "Take"}


@dataclass
class Batches:
    """What is known of the batches of an iterator.

    Attributes:
        cut: An iterator of the same batches, cut to this rank's rows (see `rebuilt`); None if there is none.
        have_common_rows: Whether it is known that all arrays of a batch have the same number of rows.
        element: Types and shapes of what the iterator of cut batches returns.
    """

    cut: Any = None
    have_common_rows: bool = False
    element: tuple[Any, ...] = ()

    def next(self) -> list[Any]:
        """Return the arrays of the next whole batch, gathered from all ranks.

        Raises:
            tf.errors.OutOfRangeError: There is none.
        """
        found = self.cut.get_next_as_optional()
        if not found.has_value():
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        rows, total, _ = found.get_value()
        topology, counted = current_session().topology, cut_of(total).counted
        ranks = tuple(range(topology.size))
        return [gathered(leaf[:counted], ranks, f"rows of a batch, array {number}")
                for number, leaf in enumerate(tf.nest.flatten(rows))]


class Iterators:
    """Iterators of this process that were created since the mode has started."""

    def __init__(self) -> None:
        self._cut: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by dataset
        self._of_arrays: weakref.WeakSet[Any] = weakref.WeakSet()
        self._batches: dict[int, Batches] = {}  # by the identity of an iterator's handle

    def cut_early(self, dataset: Any, is_of_arrays: bool) -> None:
        """Let functions that iterate over a dataset compute a rank's rows only, where that is provably the same.

        Args:
            dataset: The dataset.
            is_of_arrays: Whether Keras has made it from arrays.
        """
        found = rebuilt(dataset, is_of_arrays)
        if found is not None:
            self._cut[dataset] = found
        if is_of_arrays:
            self._of_arrays.add(dataset)

    def iterate(self, original: Callable[..., Any], iterator: Any, dataset: Any = None, *args: Any,
                **kwargs: Any) -> None:
        """Initialize an iterator over a dataset."""
        if dataset is None or not tf.executing_eagerly():
            original(iterator, dataset, *args, **kwargs)
            return
        cut = self._cut.get(dataset)
        if cut is None:
            original(iterator, dataset, *args, **kwargs)
        else:  # all that reads the iterator reads the other one
            original(iterator, None, [graphs.handle_for(dataset)], dataset.element_spec)
        replacements().note_iterated(dataset, cut is not None)
        handle = id(graphs.handle_of_iterator(iterator))
        self._batches[handle] = Batches(
            None if cut is None else iter(cut), dataset in self._of_arrays or _has_common_rows(dataset),
            () if cut is None else tuple(tf.nest.flatten(cut.element_spec)))
        weakref.finalize(iterator, self._batches.pop, handle, None)

    def next(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Return the next batch of an iterator; outside of functions, the whole one."""
        batches = self.batches(graphs.handle_of_iterator(iterator))
        if batches.cut is None or not tf.executing_eagerly():
            return original(iterator)
        return tf.nest.pack_sequence_as(iterator.element_spec, batches.next())

    def next_as_optional(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Return the next batch of an iterator as an optional value."""
        if self.batches(graphs.handle_of_iterator(iterator)).cut is None or not tf.executing_eagerly():
            return original(iterator)
        try:
            return tf.experimental.Optional.from_value(next(iterator))
        except StopIteration:
            return tf.experimental.Optional.empty(iterator.element_spec)

    def forget(self) -> None:
        """End all iterators of cut batches: at the end of Python, their threads could not."""
        self._batches.clear()
        gc.collect()

    def know(self, handle: Any) -> bool:
        """Return whether a handle is that of an iterator."""
        return id(handle) in self._batches

    def batches(self, handle: Any) -> Batches:
        """Return what is known of the batches of an iterator, given its handle."""
        return self._batches.get(id(handle), Batches())


def iterators() -> Iterators:
    """Return this process's `Iterators`."""
    return this_process().part(Iterators)


def _has_common_rows(dataset: Any) -> bool:
    while pipeline.stage_name(dataset) in _SAME_BATCH and len(pipeline.inputs(dataset)) == 1:
        dataset = pipeline.inputs(dataset)[0]
    return pipeline.stage_name(dataset) in ("Batch", "PaddedBatch", "ParallelBatch")
