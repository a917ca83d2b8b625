"""The data that Keras's `fit` and `evaluate` iterate over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.errors import UnsupportedError, explain


class KerasData:
    """The data that Keras 3's `fit` or `evaluate` iterates over.

    Attributes:
        steps: `steps_per_epoch` as the user gave it, or None.
        batches: The number of batches in one pass over the data; None if unknown, -1 if infinite.
        last_rows: The number of rows in the last batch; None if unknown.
        element_spec: The type specification of a batch, as in a `tf.data.Dataset`.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.steps: int | None = iterator.steps_per_epoch
        adapter = iterator.data_adapter
        self._strategy: Any = getattr(iterator, "_distribute_strategy", None)
        self._is_distributed = isinstance(iterator._distributed_dataset, tf.distribute.DistributedDataset)
        whole = self._whole()
        self.batches: int | None = _batches(adapter.num_batches, whole)
        self.element_spec = whole.element_spec
        self.last_rows: int | None = _rows(lambda: adapter.partial_batch_size or adapter.batch_size)

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replaces the data.

        Args:
            dataset: Maps the old dataset to the new one.
            batches: The number of batches of the new dataset; None if unknown.
        """
        changed = dataset(self._whole())
        if self._is_distributed:
            changed = self._strategy.experimental_distribute_dataset(changed)
        self._iterator._distributed_dataset = changed
        self._iterator.data_adapter = _Counted(self._iterator.data_adapter, batches)
        self._iterator._num_batches = batches

    def _whole(self) -> Any:
        """Returns the data before a strategy splits each batch between its replicas."""
        if not self._is_distributed:
            return self._iterator._distributed_dataset
        whole = self._iterator.data_adapter.get_tf_dataset()
        if isinstance(whole, tf.distribute.DistributedDataset):
            raise UnsupportedError(explain("Data for fit on several ranks must be whole batches", "pass the"
                                           " tf.data.Dataset itself: Keras deals its batches to the replicas",
                                           data=type(whole).__name__))
        return whole

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Transforms the data of each pass; parameters as in `change`."""
        self.change(of_one_pass, batches)

    def take_steps(self, steps: int) -> None:
        """Sets `steps_per_epoch`."""
        self._iterator.steps_per_epoch = steps


class TfKerasData:
    """The data that tf_keras's `fit` or `evaluate` iterates over; attributes as in `KerasData`."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        adapter = handler._adapter
        self.steps: int | None = handler._steps_per_epoch
        self.element_spec = handler._dataset.element_spec
        size = adapter.get_size()
        self.batches: int | None = _batches(size, handler._dataset if size is None else None)
        self.last_rows: int | None = _rows(lambda: adapter.partial_batch_size() or adapter.batch_size())

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replaces the data; as in `KerasData`."""
        handler = self._handler
        handler._dataset = dataset(handler._dataset)
        if self.steps is None:
            handler._inferred_steps = batches
            handler._infer_steps = lambda *_: batches

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Transforms the data of each pass; for arrays, a single dataset holds all passes."""
        passes = self.batches
        if self._handler._adapter.should_recreate_iterator() or not passes:
            self.change(of_one_pass, batches)
            return
        self.change(lambda dataset: dataset.window(passes).flat_map(
            lambda *parts: of_one_pass(_zipped(parts))), batches)

    def take_steps(self, steps: int) -> None:
        """Sets `steps_per_epoch`; as in `KerasData`."""
        self._handler._steps_per_epoch = self._handler._inferred_steps = steps


def _rows(ask: Callable[[], Any]) -> int | None:
    """Returns the number of rows in the last batch; None for the many data adapters that do not know it."""
    try:
        return ask() or None
    except (NotImplementedError, IndexError, TypeError, ValueError):
        return None


def _zipped(parts: Any) -> Any:
    """Zips the component datasets of a window into one dataset of elements."""
    return tf.data.Dataset.zip(parts) if len(parts) > 1 or isinstance(parts[0], (tuple, dict)) else parts[0]


def _batches(counted: Any, dataset: Any) -> int | None:
    if counted is not None:
        return int(counted) if counted != float("inf") else -1
    cardinality = getattr(dataset, "cardinality", None)
    number = int(cardinality()) if cardinality is not None else int(tf.data.UNKNOWN_CARDINALITY)
    if number == tf.data.INFINITE_CARDINALITY:
        return -1
    return number if number >= 0 else None


class _Counted:
    """A Keras 3 data adapter with a different number of batches."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)
