"""Datasets from dataset functions: each worker gets its part, which is repeated until training ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.errors import UsageError, explain

DatasetFunction = Callable[[Any], Any]


def whole(function: DatasetFunction, what: str) -> Any:
    """Returns the dataset that a single worker would get.

    Args:
        function: Takes a `tf.distribute.InputContext`, and returns a dataset.
        what: The name of the function in messages.

    Raises:
        UsageError: The function returns something other than batches.
    """
    return _checked(function(tf.distribute.InputContext(1, 0, 1)), what)


def part(function: DatasetFunction, what: str, number: int, index: Any) -> Any:
    """Returns one of several parts of a dataset; the index may be a tensor."""
    return _checked(function(tf.distribute.InputContext(number, index, 1)), what)


def endless_on_workers(coordinator: Any, function: DatasetFunction, workers: int) -> Any:
    """Returns an iterator on each worker that repeats the worker's part, as pairs of worker number and batch."""

    def make() -> Any:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        batches = part(function, "dataset_fn", workers, tf.cast(index, tf.int64)).repeat()
        return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(index).repeat(), batches))

    return iter(coordinator.create_per_worker_dataset(make))


def steps_of(dataset: Any) -> int:
    """Returns the number of batches in a dataset.

    Raises:
        UsageError: The number is unknown, or the dataset is infinite or empty.
    """
    count = int(dataset.cardinality().numpy())
    if count < 0:
        raise UsageError(explain("An epoch over a dataset that repeats, or whose length is not known, must be given a"
                                 " number of steps", "pass steps_per_epoch=", cardinality="infinite" if count == -1 else
                                 "unknown"))
    if count == 0:
        raise UsageError(explain("dataset_fn must return a dataset that has batches", "check what it reads",
                                 batches=0))
    return count


def _checked(dataset: Any, what: str) -> Any:
    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(explain(f"{what} must return a tf.data.Dataset of batches", "return tf.data.Dataset"
                                 ".from_tensor_slices((x, y)).shard(context.num_input_pipelines,"
                                 " context.input_pipeline_id).batch(32)", returned=type(dataset).__name__))
    return dataset
