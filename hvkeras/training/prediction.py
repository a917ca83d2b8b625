"""`hvd.predict`: prediction on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.dispatch import allgather_raw
from hvkeras.collectives.operations import members
from hvkeras.data.consistency import DataFacts, Hints, exchange, require_same_data
from hvkeras.data.datasets import leading_rows, require_same_dataset
from hvkeras.data.partition import arrays_facts
from hvkeras.data.sequences import share_like
from hvkeras.data.structure import count_rows, map_leaves, require_arrays, take_slice
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session
from hvkeras.training.fit_hooks import same_state_of
from hvkeras.typing import CallbackLike, Data, ModelLike

KERAS_BATCH_SIZE = 32
WHOLE = "pass the whole data to hvd.predict on every rank, in the same order, and do not shard them before"
HINTS = Hints("call hvd.predict with the same arguments on every rank", WHOLE, "", WHOLE,
              "all ranks must call hvd.predict; one rank by itself calls model.predict")


def predict(
    model: ModelLike, data: Data, batch_size: int | None = None, verbose: int | str = 0,
    callbacks: Sequence[CallbackLike] | None = None, process_set: ProcessSet = global_process_set,
) -> NDArray[Any]:
    """Predict on all ranks together: each rank predicts a shard of the data, and all get all predictions in order.

    Every rank must pass the complete data. They are partitioned by whole batches, so that each batch is predicted as in
    `model.predict` on one process.

    Example:
        >>> probabilities = hvd.predict(model, x_test)     # shape [len(x_test), ...] on every rank

    Args:
        model: A compiled or uncompiled Keras model, with the same weights on every rank.
        data: Any data that `model.predict` takes: arrays, a `tf.data.Dataset` of batches, or a `PyDataset` or
            `Sequence`, the same on every rank.
        batch_size: The number of rows per batch, for arrays; 32 by default.
        verbose: As for `model.predict`; `hvd.verbose()` shows rank 0's progress.
        callbacks: As for `model.predict`, for this rank's shard.
        process_set: The ranks that predict together.

    Returns:
        The result of `model.predict(data)` on one process: an array of shape `[samples, ...]`, or a structure of
        arrays.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: Ranks pass different data, or the data is infinite.
        DivergenceError: The ranks' models have different weights.
        PeerError: Prediction failed on another rank.
    """
    options = {"verbose": verbose, "callbacks": callbacks}
    is_dataset = isinstance(data, tf.data.Dataset)
    is_sequence = not is_dataset and compat.batches_base(data) is not None
    options |= {} if is_dataset or is_sequence else {"batch_size": batch_size}
    predictions: NDArray[Any]
    if len(members(process_set, "predict")) == 1:
        predictions = model.predict(data, **options)
        return predictions
    with same_state_of(model, process_set, "predict", HINTS.alone):
        if is_dataset:
            predictions = _predict_dataset(model, data, options, process_set)
        else:
            part = (_part_of_sequence(data, process_set) if is_sequence
                    else _part_of_arrays(data, batch_size, process_set))
            predictions, _ = _gather_predictions(lambda: None if part is None else model.predict(part, **options),
                                                 process_set)
    return predictions


def _size_and_index(process_set: ProcessSet) -> tuple[int, int]:
    """Return the number of ranks in a process set, and the index of this rank."""
    members = process_set.members()
    return len(members), members.index(current_session().topology.rank)


def _batch_range(count: int, process_set: ProcessSet) -> tuple[int, int]:
    """Return the start and end of this rank's batches, of `count`; rank 0 gets a batch if any rank does."""
    size, index = _size_and_index(process_set)
    return -(-index * count // size), -(-(index + 1) * count // size)


def _part_of_arrays(data: Any, batch_size: int | None, process_set: ProcessSet) -> Any:
    """Return this rank's batches of arrays; None without any."""
    require_arrays(data)
    require_same_data("predict", lambda: arrays_facts(data, f"batch_size={batch_size}"), lambda: data, HINTS,
                      process_set)
    count, rows = count_rows(data), batch_size or KERAS_BATCH_SIZE
    start, stop = _batch_range(-(-count // rows), process_set)
    if start == stop and _size_and_index(process_set)[1] > 0:
        return None
    return map_leaves(lambda leaf: take_slice(leaf, slice(start * rows, min(stop * rows, count))), data)


def _part_of_sequence(data: Any, process_set: ProcessSet) -> Any:
    """Return this rank's batches of a `PyDataset` or `Sequence`; None without any."""
    count = compat.count_batches(data)
    if count is None:
        raise UsageError(explain("Only finite data can be predicted", "give the data a length", num_batches=None))
    require_same_data("predict", lambda: DataFacts("batches", f"{count} batches", "", []), list, HINTS, process_set)
    start, stop = _batch_range(count, process_set)
    if start == stop and _size_and_index(process_set)[1] > 0:
        return None
    return share_like(data)(data, range(start, stop), [])


def _predict_dataset(model: Any, data: Any, options: dict[str, Any], process_set: ProcessSet) -> Any:
    """Predict every size-th batch on this rank, and restore the order of all rows.

    The number of rows of each array in each batch is recorded while reading. An output is matched with the first array
    that has as many rows on every rank: for a batch of graphs, outputs may be per node or per graph.
    """
    if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UsageError(explain("Only finite data can be predicted", "take() some batches", cardinality="infinite"))
    require_same_dataset("predict", data, "predict", process_set)
    size, index = _size_and_index(process_set)
    rows: dict[int, list[int]] = {}
    part = _record_rows(data.shard(size, index), rows)
    output_rows: list[int] = []

    def work() -> Any:
        if index > 0 and not any(True for _ in part.take(1)):
            rows.clear()
            return None
        outputs = model.predict(part, **options)
        output_rows[:] = [len(leaf) for leaf in tf.nest.flatten(outputs)]
        return outputs

    outputs, everyone = _gather_predictions(
        work, process_set, lambda: ([rows[number] for number in sorted(rows)], output_rows))
    with_data = [(batches, found) for batches, found in everyone if batches]
    flat = tf.nest.flatten(outputs)
    for number, leaf in enumerate(flat):
        array = next((array for array in range(len(with_data[0][0][0])) if all(
            sum(batch[array] for batch in batches) == found[number] for batches, found in with_data)), None)
        if array is None:
            raise UsageError(explain("hvd.predict puts outputs in the order of the rows of an array of the dataset, so"
                                     " one must have as many rows as the output", "add an array with a row for each row"
                                     " of the output, or pass a PyDataset", output=number, rows=len(leaf)))
        flat[number] = leaf[_original_order([[batch[array] for batch in batches] for batches, _ in everyone])]
    return tf.nest.pack_sequence_as(outputs, flat)


def _record_rows(dataset: Any, rows: dict[int, list[int]]) -> Any:
    """Return the same dataset; reading it records the rows of each array of a batch under the index of the batch."""

    def record(number: Any, counts: Any) -> Any:
        rows[int(number)] = counts.tolist()
        return number

    def recorded(number: Any, batch: Any) -> Any:
        counts = [count for count in map(leading_rows, tf.nest.flatten(batch)) if count is not None]
        with tf.control_dependencies([tf.numpy_function(record, [number, tf.stack(counts)], tf.int64)]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    return dataset.enumerate().map(recorded)


def _original_order(sizes: Sequence[Sequence[int]]) -> Any:
    """Return the position of each original row among the gathered rows, given the rows of each rank's batches."""
    starts = np.cumsum([0, *(count for counts in sizes for count in counts)])
    first_batches = np.cumsum([0, *map(len, sizes)])
    order: list[Any] = []
    for number in range(sum(map(len, sizes))):
        index, round_index = number % len(sizes), number // len(sizes)
        batch = first_batches[index] + round_index
        order.append(np.arange(starts[batch], starts[batch + 1]))
    return np.concatenate(order)


@dataclass(frozen=True)
class _RowSpec:
    """Dtype and shape of the rows of an output, for ranks without rows."""

    dtype: str
    shape: tuple[int, ...]


def _gather_predictions(work: Callable[[], Any], process_set: ProcessSet,
              extra: Callable[[], Any] = lambda: None) -> tuple[Any, list[Any]]:
    """Return the outputs of all ranks, joined in rank order, and the `extra` of each rank."""
    mine: list[Any] = []

    def describe() -> Any:
        outputs = work()
        mine.append(outputs)
        return None if outputs is None else tf.nest.map_structure(_row_spec, outputs), extra()

    gathered = exchange("hvd.predict", describe, process_set)
    specs = next(spec for spec, _ in gathered if spec is not None)  # rank 0 has some
    parts = [None] * len(tf.nest.flatten(specs)) if mine[0] is None else tf.nest.flatten(mine[0])
    joined = [_join(part, spec, f"predictions {index}", process_set)
              for index, (part, spec) in enumerate(zip(parts, tf.nest.flatten(specs), strict=True))]
    return tf.nest.pack_sequence_as(specs, joined), [sizes for _, sizes in gathered]


def _row_spec(output: Any) -> _RowSpec:
    if not isinstance(output, np.ndarray):
        raise UnsupportedError(explain("hvd.predict joins outputs that are arrays", "use model.predict on the rows of"
                                       " one rank", output=type(output).__name__))
    return _RowSpec(output.dtype.str, output.shape[1:])


def _join(part: Any, spec: _RowSpec, name: str, process_set: ProcessSet) -> Any:
    dtype = np.dtype(spec.dtype)
    part = np.zeros((0, *spec.shape), dtype) if part is None else part
    if dtype.kind in "iuf":
        return allgather_raw(tf.constant(part), process_set.ranks, name).numpy()
    return np.concatenate(allgather_object(part, name=name, process_set=process_set))
