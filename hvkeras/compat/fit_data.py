"""Data that Keras's `fit` and `evaluate` iterate over, including batches loaded by Python code.

Keras 3 calls the latter `PyDataset`, tf_keras `Sequence`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.errors import UnsupportedError, explain


def batches_base(data: Any) -> Any:
    """Returns the base class of data whose batches Keras loads: `PyDataset` or `Sequence`; None for other data."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "utils") and isinstance(data, keras.utils.PyDataset):
        return keras.utils.PyDataset
    if hasattr(tf_keras, "utils") and isinstance(data, tf_keras.utils.Sequence):
        return tf_keras.utils.Sequence
    return None


def count_batches(data: Any) -> int | None:
    """Returns the number of batches of a `PyDataset` or `Sequence`; None if it is infinite."""
    found = data.num_batches if hasattr(data, "num_batches") else len(data)
    return None if found is None else int(found)


def loading_options(data: Any) -> dict[str, Any]:
    """Returns a `PyDataset`'s loading options as constructor arguments; tf_keras takes them in `fit` instead."""
    names = ("workers", "use_multiprocessing", "max_queue_size")
    return {name: getattr(data, name) for name in names if hasattr(data, name)} if hasattr(data, "num_batches") else {}


def overrides(instance: Any, method: str) -> bool:
    """Whether the class of a `PyDataset` or `Sequence` overrides Keras's implementation of a method."""
    base = batches_base(instance)
    return getattr(type(instance), method, None) is not getattr(base, method, None)


class KerasData:
    """The data that Keras 3's `fit` or `evaluate` iterates over.

    Attributes:
        steps: `steps_per_epoch` as the user gave it, or None.
        batches: The number of batches in one pass over the data; None if unknown, -1 if infinite.
        last_rows: The number of rows in the last batch; None if unknown.
        element_spec: The type specification of a batch, as in a `tf.data.Dataset`.
        source: The `PyDataset` or `Sequence` that they come from; None for other data.
        renews: Whether each epoch starts to read the data as they are then.
    """

    renews = True

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.steps: int | None = iterator.steps_per_epoch
        adapter = iterator.data_adapter
        self._strategy: Any = getattr(iterator, "_distribute_strategy", None)
        self._is_distributed = isinstance(iterator._distributed_dataset, tf.distribute.DistributedDataset)
        self._given = self._whole()
        self.batches: int | None = _batches(adapter.num_batches, self._given)
        self.element_spec = self._given.element_spec
        self.source: Any = _source(getattr(adapter, "py_dataset", None))
        self.last_rows: int | None = _rows(lambda: adapter.partial_batch_size or adapter.batch_size)

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replaces the data.

        Args:
            dataset: Maps the dataset that Keras made of the user's data to the new one.
            batches: The number of batches of the new dataset; None if unknown.
        """
        iterator = self._iterator
        changed = dataset(self._given)
        if self._is_distributed:
            changed = self._strategy.experimental_distribute_dataset(changed)
        iterator._distributed_dataset = changed
        self._adapted().num_batches = batches
        iterator._num_batches = batches
        if iterator.steps_per_epoch:  # the next pass was prepared when the last one ended
            iterator._current_iterator = None

    @property
    def is_amid_pass(self) -> bool:
        """Whether an epoch that begins now goes on with the pass of the last one, as with `steps_per_epoch`."""
        return bool(self._iterator.steps_per_epoch and self._iterator._steps_seen)

    def count(self) -> int | None:
        """Returns the number of batches in a pass that begins now; None if unknown."""
        return _count_now(self.source, self.batches)

    def at_each_pass(self, function: Callable[[], None]) -> bool:
        """Calls `function` before each epoch reads its first batch.

        Returns:
            Whether this version of Keras makes that possible; else it must be called in `on_epoch_begin`.
        """
        steps = [getattr(type(self._iterator), name, None) for name in ("_enumerate_iterator", "enumerate_epoch")]
        if not any("on_epoch_begin" in inspect.unwrap(made).__code__.co_names for made in steps if made is not None):
            return False
        self._adapted().before_pass = function
        return True

    def _adapted(self) -> _Adapted:
        if not isinstance(self._iterator.data_adapter, _Adapted):
            self._iterator.data_adapter = _Adapted(self._iterator.data_adapter)
        return self._iterator.data_adapter

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

    is_amid_pass = False  # data of batches begin again with each epoch, and other data do not change

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        adapter = handler._adapter
        self._given = handler._dataset
        self.renews: bool = adapter.should_recreate_iterator()
        self.source: Any = _source(getattr(adapter, "_keras_sequence", None))
        self.steps: int | None = handler._steps_per_epoch
        self.element_spec = handler._dataset.element_spec
        size = adapter.get_size()
        self.batches: int | None = _batches(size, handler._dataset if size is None else None)
        self.last_rows: int | None = _rows(lambda: adapter.partial_batch_size() or adapter.batch_size())

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replaces the data; as in `KerasData`."""
        handler = self._handler
        handler._dataset = dataset(self._given)
        if self.steps is None:
            handler._inferred_steps = batches
            handler._infer_steps = lambda *_: batches

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Transforms the data of each pass; for arrays, a single dataset holds all passes."""
        passes = self.batches
        if self.renews or not passes:
            self.change(of_one_pass, batches)
            return
        self.change(lambda dataset: dataset.window(passes).flat_map(
            lambda *parts: of_one_pass(_zipped(parts))), batches)

    def count(self) -> int | None:
        """Returns the number of batches in a pass that begins now; as in `KerasData`."""
        return _count_now(self.source, self.batches)

    def at_each_pass(self, function: Callable[[], None]) -> bool:
        """Calls `function` before each epoch reads its first batch; as in `KerasData`."""
        self._handler._adapter = _Adapted(self._handler._adapter)
        self._handler._adapter.before_pass = function
        return True

    def take_steps(self, steps: int) -> None:
        """Sets `steps_per_epoch`; as in `KerasData`."""
        self._handler._steps_per_epoch = self._handler._inferred_steps = steps


def empty_optional(spec: Any) -> Any:
    """Returns a value of a `tf.OptionalSpec`: one that holds nothing."""
    return tf.experimental.Optional.empty(spec._element_spec)


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


def _source(data: Any) -> Any:
    """Returns a `PyDataset` or `Sequence` of known length; None for anything else."""
    return data if batches_base(data) is not None and count_batches(data) is not None else None


def _count_now(source: Any, before: int | None) -> int | None:
    now = None if source is None else count_batches(source)
    return before if now is None else now


class _Adapted:
    """A data adapter with another number of batches in Keras 3, or something to do before each pass over the data."""

    num_batches: int | None  # if it is set; else that of the adapter

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.before_pass: Callable[[], None] = _nothing

    def on_epoch_begin(self) -> None:
        """Called by Keras 3 when a pass begins."""
        self._adapter.on_epoch_begin()
        self.before_pass()

    def should_recreate_iterator(self) -> bool:
        """Called by tf_keras when a pass begins."""
        self.before_pass()
        return bool(self._adapter.should_recreate_iterator())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def _nothing() -> None:
    """Does nothing before a pass."""
