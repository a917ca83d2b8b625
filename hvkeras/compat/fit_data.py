"""Data that Keras's `fit` and `evaluate` iterate over, including `PyDataset` (Keras 3) and `Sequence` (tf_keras)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.errors import UnsupportedError, explain


def batches_base(data: Any) -> Any:
    """Return `PyDataset` or `Sequence` if data are an instance of it, else None."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "utils") and isinstance(data, keras.utils.PyDataset):
        return keras.utils.PyDataset
    if hasattr(tf_keras, "utils") and isinstance(data, tf_keras.utils.Sequence):
        return tf_keras.utils.Sequence
    return None


def count_batches(data: Any) -> int | None:
    """Return the number of batches of a `PyDataset` or `Sequence`; None if it is infinite."""
    found = data.num_batches if hasattr(data, "num_batches") else len(data)
    return None if found is None else int(found)


def loading_options(data: Any) -> dict[str, Any]:
    """Return a `PyDataset`'s prefetching options as constructor arguments; in tf_keras, they are arguments of `fit`."""
    names = ("workers", "use_multiprocessing", "max_queue_size")
    return {name: getattr(data, name) for name in names if hasattr(data, name)} if hasattr(data, "num_batches") else {}


def overrides(instance: Any, method: str) -> bool:
    """Return whether the class of a `PyDataset` or `Sequence` overrides Keras's implementation of a method."""
    base = batches_base(instance)
    return getattr(type(instance), method, None) is not getattr(base, method, None)


class KerasData:
    """Data that Keras 3's `fit` or `evaluate` iterates over.

    Attributes:
        steps: The user's `steps_per_epoch`, or None.
        batches: The number of batches in one pass over the data; None if unknown, -1 if infinite.
        last_rows: The number of rows in the last batch; None if unknown.
        element_spec: The type specification of a batch, as in a `tf.data.Dataset`.
        source: The original `PyDataset` or `Sequence`; None for other data.
        renews: Whether each epoch creates a new iterator over the current data.
    """

    renews = True

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.steps: int | None = iterator.steps_per_epoch
        adapter = iterator.data_adapter
        self._strategy: Any = getattr(iterator, "_distribute_strategy", None)
        self._is_distributed = isinstance(iterator._distributed_dataset, tf.distribute.DistributedDataset)
        self._given = self._global_dataset()
        self.batches: int | None = _batches(adapter.num_batches, self._given)
        self.element_spec = self._given.element_spec
        self.is_of_arrays: bool = type(adapter).__name__ == "ArrayDataAdapter"
        self.is_of_dataset: bool = type(adapter).__name__ == "TFDatasetAdapter"
        self.is_of_generator: bool = type(adapter).__name__ == "GeneratorDataAdapter"
        self.source: Any = _source(getattr(adapter, "py_dataset", None))
        self.last_rows: int | None = _rows(lambda: adapter.partial_batch_size or adapter.batch_size)

    def change(self, dataset: Callable[[Any], Any], batches: int | None) -> None:
        """Replace the data.

        Args:
            dataset: Maps Keras's dataset of the user's data to the new dataset.
            batches: The number of batches of the new dataset; None if unknown.
        """
        iterator = self._iterator
        changed = dataset(self._given)
        if self._is_distributed:
            changed = self._strategy.experimental_distribute_dataset(changed)
        iterator._distributed_dataset = changed
        self._replace_adapter().num_batches = batches
        iterator._num_batches = batches
        if iterator.steps_per_epoch:  # Keras prepares the next pass at the end of the last one
            iterator._current_iterator = None

    @property
    def is_distributed(self) -> bool:
        """True if a strategy splits the batches over replicas."""
        return self._is_distributed

    @property
    def dataset(self) -> Any:
        """The dataset that is iterated."""
        return self._iterator._distributed_dataset

    def replace(self, dataset: Callable[[Any], Any]) -> None:
        """Replace the data by others with as many batches.

        Args:
            dataset: Maps Keras's dataset of the user's data to the new dataset; None to keep it.
        """
        found = dataset(self._iterator._distributed_dataset)
        if found is not None:
            self._iterator._distributed_dataset = found

    @property
    def is_mid_pass(self) -> bool:
        """True if the next epoch continues the pass of the last one, as with `steps_per_epoch`."""
        return bool(self._iterator.steps_per_epoch and self._iterator._steps_seen)

    def count(self) -> int | None:
        """Return the number of batches in a pass that begins now; None if unknown."""
        return _count_now(self.source, self.batches)

    def at_each_pass(self, function: Callable[[], None]) -> bool:
        """Call `function` before each epoch reads its first batch.

        Returns:
            Whether this version of Keras supports this; otherwise, call the function in `on_epoch_begin`.
        """
        steps = [getattr(type(self._iterator), name, None) for name in ("_enumerate_iterator", "enumerate_epoch")]
        if not any("on_epoch_begin" in inspect.unwrap(made).__code__.co_names for made in steps if made is not None):
            return False
        self._replace_adapter().before_pass = function
        return True

    def _replace_adapter(self) -> _DataAdapter:
        if not isinstance(self._iterator.data_adapter, _DataAdapter):
            self._iterator.data_adapter = _DataAdapter(self._iterator.data_adapter)
        return self._iterator.data_adapter

    def _global_dataset(self) -> Any:
        """Return the dataset before a strategy splits its batches over replicas."""
        if not self._is_distributed:
            return self._iterator._distributed_dataset
        dataset = self._iterator.data_adapter.get_tf_dataset()
        if isinstance(dataset, tf.distribute.DistributedDataset):
            raise UnsupportedError(explain("Data for fit on several ranks must be global batches", "pass the"
                                           " tf.data.Dataset itself: Keras splits its batches over the replicas",
                                           data=type(dataset).__name__))
        return dataset

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Transform the data of each pass; for parameters, see `change`."""
        self.change(of_one_pass, batches)

    def take_steps(self, steps: int) -> None:
        """Set `steps_per_epoch`."""
        self._iterator.steps_per_epoch = steps


class TfKerasData:
    """Data that tf_keras's `fit` or `evaluate` iterates over; for attributes, see `KerasData`."""

    is_mid_pass = False  # a Sequence restarts with each epoch, and other data do not change

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
        """Replace the data; see `KerasData`."""
        handler = self._handler
        handler._dataset = dataset(self._given)
        if self.steps is None:
            handler._inferred_steps = batches
            handler._infer_steps = lambda *_: batches

    def pass_by_pass(self, of_one_pass: Callable[[Any], Any], batches: int | None) -> None:
        """Transform the data of each pass; for arrays, a single dataset holds all passes."""
        passes = self.batches
        if self.renews or not passes:
            self.change(of_one_pass, batches)
            return
        self.change(lambda dataset: dataset.window(passes).flat_map(
            lambda *parts: of_one_pass(_zipped(parts))), batches)

    def count(self) -> int | None:
        """Return the number of batches in a pass that begins now; see `KerasData`."""
        return _count_now(self.source, self.batches)

    def at_each_pass(self, function: Callable[[], None]) -> bool:
        """Call `function` before each epoch reads its first batch; see `KerasData`."""
        self._handler._adapter = _DataAdapter(self._handler._adapter)
        self._handler._adapter.before_pass = function
        return True

    def take_steps(self, steps: int) -> None:
        """Set `steps_per_epoch`; see `KerasData`."""
        self._handler._steps_per_epoch = self._handler._inferred_steps = steps


def empty_optional(spec: Any) -> Any:
    """Return an empty value of a `tf.OptionalSpec`."""
    return tf.experimental.Optional.empty(spec._element_spec)


def _rows(count: Callable[[], Any]) -> int | None:
    try:
        return count() or None
    except (NotImplementedError, IndexError, TypeError, ValueError):
        return None


def _zipped(parts: Any) -> Any:
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
    """Return a `PyDataset` or `Sequence` of known length; None for anything else."""
    return data if batches_base(data) is not None and count_batches(data) is not None else None


def _count_now(source: Any, before: int | None) -> int | None:
    now = None if source is None else count_batches(source)
    return before if now is None else now


class _DataAdapter:
    """Data adapter with another number of batches in Keras 3, or with a hook before each pass over the data."""

    num_batches: int | None  # overrides that of the adapter if set

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.before_pass: Callable[[], None] = _nothing

    def on_epoch_begin(self) -> None:  # called by Keras 3
        self._adapter.on_epoch_begin()
        self.before_pass()

    def should_recreate_iterator(self) -> bool:  # called by tf_keras when a pass begins
        self.before_pass()
        return bool(self._adapter.should_recreate_iterator())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def _nothing() -> None:
    """Do nothing before a pass."""
