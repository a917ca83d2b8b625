"""Sharding of a `tf.data.Dataset`: its samples one by one, or the rows of each of its batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.data.accounts import keeps_accounts
from hvkeras.data.partition import Batches, Coverage, Partition
from hvkeras.data.pipeline import (
    batch_size,
    batches_of,
    has_scalars,
    has_stage,
    is_batched,
    is_nondeterministic,
    shuffle_seeds,
    static_rows,
    zipped_batches,
)
from hvkeras.data.proof import DataFacts, Hints, fingerprint, require_same_data
from hvkeras.data.resharding import resharded_dataset, shares
from hvkeras.data.sequences import Share
from hvkeras.data.structure import with_rows
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

FIX = ("shard first and shuffle after it, hvd.shard(dataset, shuffle=1000).batch(32), or give shuffle() the same seed"
       " on every rank, after the same tf.random.set_seed or keras.utils.set_random_seed")
HINTS = Hints(
    call="call hvd.shard with the same arguments on every rank",
    amount="pass the whole dataset to hvd.shard on every rank, and do not split it before",
    order=FIX,
    contents="pass the whole dataset to hvd.shard on every rank, not a part of it; and " + FIX,
)
FIRST_ELEMENTS = 8  # compared between ranks in an unbatched dataset; in a batched one, only the first is


WAYS_OUT = ('hvd.shard(dataset, by="elements") deals whole elements to the ranks; or shard before batching, or pass'
            " batched=False if each element is one sample")



def shard_dataset(
    dataset: Any, partition: Partition, shuffle: Any, seed: int, batched: bool | None, whole: bool,
    process_set: ProcessSet,
) -> tuple[Any, Coverage]:
    """Returns this rank's share of a dataset."""
    _require_options(shuffle, batched)
    if partition.size == 1 and not keeps_accounts():
        return _shuffled(dataset, shuffle, seed), Coverage(None, None, 0, "the whole dataset")
    call = f"training={partition.training}, shuffle={shuffle}, seed={seed}, batched={batched}, whole elements={whole}"
    comparable, first = require_same_dataset("shard", dataset, call, process_set)
    if whole:
        share, coverage = split_samples(dataset, partition, "element")
        share = _shuffled(share, shuffle, seed + partition.rank)
        shares().of_whole_elements[share] = True
        return share, coverage if comparable else coverage.doubtful()
    batched = is_batched(dataset) if batched is None else batched
    if batched is None:
        raise UsageError(explain(
            "It must be known whether a dataset's elements are batches", "pass batched=True to hvd.shard if each"
            " element is a batch, batched=False if each is one sample", dataset=type(dataset).__name__,
            element_spec=dataset.element_spec))
    if batched and has_scalars(dataset):
        raise UsageError(explain("A batch must have a first dimension", "pass batched=False, or batch the dataset"
                                 " before", element_spec=dataset.element_spec))
    if batched and shuffle:
        raise UsageError(explain("Samples are shuffled before they are batched", "write hvd.shard(dataset,"
                                 " shuffle=1000).batch(32) with the dataset before its batch()", shuffle=shuffle))
    if keeps_accounts() and not batched and partition.training and int(dataset.cardinality()) > 0:
        _, coverage = split_samples(dataset, partition)
        share = resharded_dataset(dataset, fingerprint(first), int(dataset.cardinality()), shuffle, seed)
        return share, coverage if comparable else coverage.doubtful()
    share, coverage = split_batches(dataset, partition, first) if batched else split_samples(dataset, partition)
    return _shuffled(share, shuffle, seed + partition.rank), coverage if comparable else coverage.doubtful()


def require_same_dataset(name: str, dataset: Any, call: str, process_set: ProcessSet) -> tuple[bool, list[Any]]:
    """Checks that all ranks read the same dataset in the same order, as `proof.require_same_data` does.

    Returns:
        Whether the contents could be compared, and the arrays of the elements that were compared.

    Raises:
        UsageError: They do not, or the dataset's order changes at every reading.
    """
    seeds = shuffle_seeds(dataset)
    count = int(dataset.cardinality())
    first: list[Any] = []
    amounts = {tf.data.UNKNOWN_CARDINALITY: "unknown", tf.data.INFINITE_CARDINALITY: "infinite"}

    def describe() -> DataFacts:
        if (0, 0) in seeds:
            raise UsageError(explain("A dataset that all ranks share must be read in the same order on all ranks, but"
                                     " shuffle() without a seed gives each rank its own", FIX, dataset=type(dataset)
                                     .__name__))
        if is_nondeterministic(dataset):
            raise UsageError(explain("A dataset that all ranks share must be read in the same order on all ranks",
                                     "remove deterministic=False from the dataset's options, map, batch and"
                                     " interleave; it may be set after hvd.shard", deterministic=False))
        first.extend(_first(dataset))
        return DataFacts(f"{dataset.element_spec}, {call}", f"{amounts.get(count, f'{count:,}')} elements",
                     f"seeds of shuffles {seeds}", fingerprint(first))

    return require_same_data(name, describe, lambda: _first(dataset), HINTS, process_set), first


def _first(dataset: Any) -> list[Any]:
    """Returns the arrays of the elements that are compared between ranks."""
    count = 1 if is_batched(dataset) else FIRST_ELEMENTS
    return [with_rows(leaf) for element in itertools.islice(dataset, count) for leaf in tf.nest.flatten(element)]


def _require_options(shuffle: Any, batched: Any) -> None:
    if shuffle is True or not isinstance(shuffle, int) or shuffle < 0:
        raise UsageError(explain("A dataset is shuffled through a buffer of so many samples",
                                 "pass shuffle=1000, or another number of samples", shuffle=shuffle))
    if batched not in (None, True, False):
        raise UsageError(explain("batched must be True, False or None", "leave it out", batched=batched))


def _shuffled(dataset: Any, buffer_size: int, seed: int) -> Any:
    return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True) if buffer_size else dataset


def keeps_elements_whole(data: Any) -> bool:
    """Whether data are a share of `hvd.shard` whose elements were assigned whole, or a pipeline that reads one."""
    if not isinstance(data, tf.data.Dataset):
        return isinstance(data, Share) and data.keeps_whole

    def is_share(stage: Any) -> bool:
        return bool(shares().of_whole_elements.get(stage))

    return has_stage(data, is_share)


def split_samples(dataset: Any, partition: Partition, what: str = "sample") -> tuple[Any, Coverage]:
    """Returns this rank's elements of a dataset, which are assigned to the ranks one by one.

    Args:
        dataset: The whole dataset.
        partition: The partition.
        what: What an element is called in messages.
    """
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        note = f"1 of every {{size}} {what}s of an endless dataset"
        return dataset.shard(partition.size, partition.rank), _unknown(partition, note)
    if count == tf.data.UNKNOWN_CARDINALITY:
        note = f"1 of every {{size}} {what}s of a dataset of unknown length, overlap 0, dropped "
        if not partition.training:
            return dataset.shard(partition.size, partition.rank), _unknown(partition, note + "0")
        return _full_groups(dataset, partition), _unknown(partition, note + f"at most {partition.size - 1}")
    partition.require_one_each(count, what)
    coverage = Coverage(len(partition.rows(count)), count, partition.dropped(count), what=what)
    share = dataset.take(count - partition.dropped(count)).shard(partition.size, partition.rank)
    # tf_keras evaluates data without elements only if their length is not known.
    return share if coverage.mine else share.filter(lambda *_: True), coverage


def _full_groups(dataset: Any, partition: Partition) -> Any:
    """Assigns samples in groups of one per rank, as the length is unknown; drops the last group if it is incomplete."""
    unpacked = type(dataset.element_spec) is tuple  # then tf.data passes its items as separate arguments

    def pick(*group: Any) -> Any:
        return tf.data.Dataset.zip(tf.nest.map_structure(lambda samples: samples.skip(partition.rank).take(1),
                                                         group if unpacked else group[0]))

    return dataset.window(partition.size, drop_remainder=True).flat_map(pick)


def split_batches(dataset: Any, partition: Partition, first: list[Any]) -> tuple[Any, Coverage]:
    """Returns this rank's part of each batch; batches that are too small to give it any row are left out.

    `first` holds the arrays of the first batch: a map() may have changed the number of rows that batch() states.
    """
    rows = batch_size(dataset)
    if partition.training and rows is not None and rows < partition.size:
        raise UsageError(explain("A batch must have at least one row for each rank", "pass to batch() the number of"
                                 " rows of all ranks in a step", batch_size=rows, ranks=partition.size))
    apart = zipped_batches(dataset)
    of_one = first[: len(tf.nest.flatten(dataset.element_spec))]  # several elements may have been read
    of_arrays = [None if found is None else int(found) for found in map(leading_rows, of_one)]
    of_first = of_arrays[0] if of_arrays else None
    of_arrays = _rows_of_full_batch(dataset, of_arrays, apart, partition)
    known = batches_of(dataset)
    if of_first is not None and known is not None and of_first != (known.rows if known.full else known.last):
        rows = known = None
    unpacked = type(dataset.element_spec) is tuple  # then tf.data passes its items as separate arguments

    def cut(*element: Any) -> Any:
        return _cut(element if unpacked else element[0], partition, of_arrays, bool(apart))

    share = dataset.map(cut)
    coverage, parts = _coverage_of_each(dataset, apart, partition, of_arrays) if apart else \
        _batches_coverage(dataset, partition, rows, known)
    if parts == 0:
        share = share.take(1)  # Keras cannot evaluate without a batch, and an empty one adds nothing to any metric
    elif apart or static_rows(dataset) is None or not partition.part_size(static_rows(dataset) or 0):
        share = share.filter(_has_rows)
        if parts is not None:
            share = share.apply(tf.data.experimental.assert_cardinality(parts))
        elif int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            share = share.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return share, coverage


def _rows_of_full_batch(dataset: Any, rows: Sequence[int | None], apart: Sequence[Any],
                        partition: Partition) -> list[int | None]:
    """Returns the number of rows of each array in a full batch, whose ratio says which rows belong together.

    Arrays with unlike numbers of rows can be cut if each was batched by itself: `tf.data.Dataset.zip` then pairs so
    many rows of one with so many of another. Nothing shows which rows of other arrays belong together.

    Args:
        dataset: The dataset.
        rows: The number of rows of each array in the first batch; None for what has none.
        apart: The datasets that were batched and then zipped; none for others.
        partition: The partition.

    Raises:
        UsageError: The arrays cannot be cut.
    """
    unmapped = [batch_size(one) for one in zipped_batches(dataset, unmapped=True)
                for _ in tf.nest.flatten(one.element_spec)]
    if len(unmapped) == len(rows) and None not in unmapped:
        rows = [size if count is not None else None for size, count in zip(unmapped, rows, strict=True)]
    found = sorted({count for count in rows if count is not None})
    if len(found) < 2:
        return list(rows)
    sizes = sorted({size for size in map(batch_size, apart) if size is not None})
    if len(sizes) != len(found) or any(count * sizes[0] != size * found[0]
                                       for count, size in zip(found, sizes, strict=True)):
        raise UsageError(explain("All arrays of a batch must have the same number of rows, or come from datasets that"
                                 " were batched one by one and then zipped", WAYS_OUT, rows=list(rows)))
    if partition.training and math.gcd(*found) < partition.size:
        raise UsageError(explain("A batch must be cut so that every rank gets as many rows of each array as their ratio"
                                 " says", "choose batch sizes that the number of ranks divides; or " + WAYS_OUT,
                                 rows=list(rows), ranks=partition.size))
    return list(rows)


def _coverage_of_each(dataset: Any, apart: Sequence[Any], partition: Partition,
                      rows: Sequence[int | None]) -> tuple[Coverage, int | None]:
    """Returns the coverage of batches of datasets that were batched one by one, and the number of this rank's parts.

    The rows of all arrays count.
    """
    found = sorted({count for count in rows if count is not None}) or [1]
    sizes, unit = " and ".join(map(str, found)), math.gcd(*found)
    left = partition.dropped(unit)
    wasted = f"{' and '.join(str(count // unit * left) for count in found)} of every {sizes}" if left else ""
    streams, count = [batches_of(one) for one in apart], int(dataset.cardinality())
    full = [0 if one is None else one.rows for one in streams]
    if count > 0 and all(full) and sorted({size // math.gcd(*full) for size in full}) == [
            size // unit for size in found]:
        last = [one.rows if count <= one.full else one.last for one in streams if one is not None]
        mine, total, parts = 0, 0, 0
        for counts, times in ((full, count - 1), (last, 1)):
            starts, stops = _places(counts, [size // math.gcd(*full) for size in full], partition, apart=True)
            part = int(sum(stops)) - int(sum(starts))
            mine, total, parts = mine + times * part, total + times * sum(counts), parts + times * bool(part)
        dropped = total - partition.size * mine if partition.training else 0
        return Coverage(mine, total, dropped, wasted, "row"), parts
    most = (f"{wasted or 0}, at most {partition.size - 1} rows of each array of a smaller batch, and smaller batches"
            " with an array of fewer rows than ranks") if partition.training else "0"
    whole = "an endless dataset" if count == tf.data.INFINITE_CARDINALITY else "a dataset of unknown length"
    return _unknown(partition, f"1/{{size}} of every batch ({sizes} rows) of {whole}, overlap 0, dropped {most}"), None


def _batches_coverage(dataset: Any, partition: Partition, rows: int | None,
                      known: Batches | None) -> tuple[Coverage, int | None]:
    """Returns the coverage of batches of one dataset, and the number of this rank's parts, if known."""
    wasted = partition.dropped(rows or 0)
    note = f"{wasted} of every {rows}: a batch of {rows - wasted} or {rows - wasted + partition.size} drops none" \
        if wasted and rows else ""
    if known is not None:
        found, parts = known.cut(partition)
        return Coverage(found.mine, found.total, found.dropped, note), parts
    endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    most = f"at most {partition.size - 1} per batch" if partition.training else "0"
    whole = "an endless dataset" if endless else "a dataset of unknown length"
    return _unknown(partition, f"1/{{size}} of every batch of {whole}, overlap 0, dropped {note or most}"), None


def _unknown(partition: Partition, note: str) -> Coverage:
    return Coverage(None, None, 0, note.format(size=partition.size))


def _cut(batch: Any, partition: Partition, of_full: Sequence[int | None], apart: bool) -> Any:
    """Returns this rank's rows of a batch.

    Args:
        batch: The batch, in a function of `tf.data`.
        partition: The partition.
        of_full: The number of rows of each array in a full batch; none if that is not known.
        apart: Whether the arrays may have unlike numbers of rows.
    """
    arrays = tf.nest.flatten(batch)
    counts = [_static_or_leading_rows(leaf) for leaf in arrays]
    known = [count for count in counts if count is not None]
    ratio = [rows for rows in of_full if rows is not None]
    if len(known) != len(ratio) or not all(ratio):
        ratio = [1] * len(known)
    unit = math.gcd(*ratio)
    starts, stops = _places(known, [rows // unit for rows in ratio], partition, apart)
    indices = iter(zip(starts, stops, strict=True))
    return tf.nest.pack_sequence_as(batch, [leaf if count is None else _slice(leaf, *next(indices))
                                            for leaf, count in zip(arrays, counts, strict=True)])


def _places(counts: Sequence[Any], ratio: Sequence[int], partition: Partition,
            apart: bool) -> tuple[list[Any], list[Any]]:
    """Returns this rank's first row of each array of a batch, and the row after its last.

    Rows of several arrays belong together in groups, as the ratio says. Where a batch has another ratio, as one that a
    zipped dataset ends with may have, each array is cut by itself.

    Args:
        counts: The number of rows of each array, numbers or int64 tensors.
        ratio: How many rows of each array belong together; without a common divisor.
        partition: The partition.
        apart: Whether the arrays may have another ratio; otherwise that is an error.
    """
    if all(isinstance(count, int) for count in counts):
        in_ratio: Any = all(count * ratio[0] == counts[0] * rows for count, rows in zip(counts, ratio, strict=True))
        counts = counts if in_ratio and set(ratio) == {1} else [tf.constant(count, tf.int64) for count in counts]
    if all(isinstance(count, int) for count in counts):
        start, stop = partition.part(counts[0])
        return [start] * len(counts), [stop] * len(counts)
    rows = tf.stack([tf.cast(count, tf.int64) for count in counts])
    in_groups = tf.constant(ratio, tf.int64)
    in_ratio = tf.reduce_all(rows * in_groups[0] == rows[0] * in_groups)
    start, stop = partition.part(rows[0] // in_groups[0])
    if not apart:
        text = ("All arrays of every batch must have the same number of rows, but they have the following ones. HINT: "
                + WAYS_OUT)
        with tf.control_dependencies([tf.debugging.Assert(in_ratio, [text, rows], summarize=len(counts))]):
            start, stop = tf.identity(start), tf.identity(stop)
        return [start] * len(counts), [stop] * len(counts)
    first, after = partition.part(rows)
    enough = tf.reduce_all(rows >= partition.size)
    if partition.training:
        after = tf.where(enough, after, first)
    else:  # an array without rows would spoil what the model computes from the others: one rank gets the whole batch
        mine = partition.rank == partition.size - 1
        first = tf.where(enough, first, tf.zeros_like(rows))
        after = tf.where(enough, after, rows if mine else tf.zeros_like(rows))
    first = tf.where(in_ratio, start * in_groups, first)
    after = tf.where(in_ratio, stop * in_groups, after)
    return [first[index] for index in range(len(counts))], [after[index] for index in range(len(counts))]


def _slice(rows: Any, start: Any, stop: Any) -> Any:
    if not isinstance(rows, tf.sparse.SparseTensor):
        return rows[start:stop]
    zeros = tf.zeros_like(rows.dense_shape)
    first = tf.concat([[tf.cast(start, tf.int64)], zeros[1:]], 0)
    return tf.sparse.slice(rows, first, tf.concat([[tf.cast(stop - start, tf.int64)], rows.dense_shape[1:]], 0))


def _has_rows(*element: Any) -> Any:
    """Whether any array of a batch has rows."""
    counts = [count for count in map(leading_rows, tf.nest.flatten(element)) if count is not None]
    return tf.reduce_any(tf.stack(counts) > 0)


def _static_or_leading_rows(leaf: Any) -> Any:
    static = leaf.shape[0] if isinstance(leaf, tf.Tensor) and leaf.shape.rank else None
    return leading_rows(leaf) if static is None else static


def leading_rows(leaf: Any) -> Any:
    """Returns the number of rows of a dense, ragged or sparse tensor, as a tensor; None for what has no rows."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.sparse.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 else None
