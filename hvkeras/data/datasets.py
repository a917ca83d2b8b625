"""Sharding of a `tf.data.Dataset`: sample by sample, or by the rows of each batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.data.accounts import keeps_accounts
from hvkeras.data.consistency import DataFacts, Hints, fingerprint, require_same_data
from hvkeras.data.own_rows import select_before_maps, split_before_maps
from hvkeras.data.partition import Batches, Coverage, Partition
from hvkeras.data.pipeline import (
    COMPLETE,
    batch_size,
    batches_of,
    has_scalars,
    has_stage,
    is_batched,
    is_nondeterministic,
    shuffle_seeds,
    stage_name,
    stages,
    static_rows,
    zipped_batches,
)
from hvkeras.data.resharding import resharded_dataset, shares
from hvkeras.data.sequences import Share
from hvkeras.data.shuffles import FIX, SAME_ORDER, lines_to_write, restarted, seeds_of_selection, shuffled_alike
from hvkeras.data.structure import with_rows
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

HINTS = Hints(
    call="call hvd.shard with the same arguments on every rank",
    amount="pass the whole dataset to hvd.shard on every rank, and do not split it before",
    order=FIX,
    contents="pass the whole dataset to hvd.shard on every rank, not a part of it; seed all that is random in it, as in"
             " numpy.random.default_rng(seed=0) and image_dataset_from_directory(..., seed=1); and " + FIX,
)
FIRST_ELEMENTS = 8  # compared between ranks in an unbatched dataset; in a batched one, only the first is
SPLIT_HINT = ('hvd.shard(dataset, by="elements") assigns whole elements to the ranks; or shard before batching, or pass'
            " batched=False if each element is one sample")


def shard_dataset(
    dataset: Any, partition: Partition, shuffle: Any, seed: int, batched: bool | None, whole: bool,
    process_set: ProcessSet,
) -> tuple[Any, Coverage]:
    """Return this rank's shard of a dataset."""
    _require_options(shuffle, batched)
    if partition.size == 1 and not keeps_accounts():
        return _shuffled(dataset, shuffle, seed), Coverage(None, None, 0, "the whole dataset")
    call = f"training={partition.training}, shuffle={shuffle}, seed={seed}, batched={batched}, whole elements={whole}"
    dataset = shuffled_alike(dataset, seed, process_set)
    comparable, first = require_same_dataset("shard", dataset, call, process_set)
    if whole:
        share, coverage = split_samples(dataset, partition, "element")
        share = _shuffled(share, shuffle, seed + partition.rank)
        return share, coverage if comparable else coverage.unverified()
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
        return share, coverage if comparable else coverage.unverified()
    share, coverage = split_batches(dataset, partition, first) if batched else split_samples(dataset, partition)
    return _shuffled(share, shuffle, seed + partition.rank), coverage if comparable else coverage.unverified()


def require_same_dataset(name: str, dataset: Any, call: str, process_set: ProcessSet) -> tuple[bool, list[Any]]:
    """Check that all ranks read the same dataset in the same order, with `proof.require_same_data`.

    Returns:
        Whether the contents could be compared, and the arrays of the elements that were compared.

    Raises:
        UsageError: They do not, or the dataset's order differs each time it is read.
    """
    seeds = shuffle_seeds(dataset)
    count = int(dataset.cardinality())
    first: list[Any] = []
    amounts = {tf.data.UNKNOWN_CARDINALITY: "unknown", tf.data.INFINITE_CARDINALITY: "infinite"}

    def describe() -> DataFacts:
        if (0, 0) in seeds:
            raise UsageError(explain(f"{SAME_ORDER}, but shuffle() without a seed gives each rank its own",
                                     lines_to_write(dataset), dataset=type(dataset).__name__))
        if is_nondeterministic(dataset):
            raise UsageError(explain(SAME_ORDER, "remove deterministic=False from the dataset's options, map, batch and"
                                     " interleave; it may be set after hvd.shard", deterministic=False))
        first.extend(_first_arrays(dataset))
        return DataFacts(f"{dataset.element_spec}, {call}", f"{amounts.get(count, f'{count:,}')} elements",
                     f"seeds of shuffles {[*seeds, *seeds_of_selection(dataset)]}", fingerprint(first))

    return require_same_data(name, describe, lambda: _first_arrays(dataset), HINTS, process_set), first


def _first_arrays(dataset: Any) -> list[Any]:
    count = 1 if is_batched(dataset) else FIRST_ELEMENTS
    dataset = restarted(dataset)  # otherwise, a second reading has another order
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
    """Return whether data are a shard of `hvd.shard` with whole elements, or a pipeline that reads one."""
    if not isinstance(data, tf.data.Dataset):
        return isinstance(data, Share) and data.keeps_whole

    def is_share(stage: Any) -> bool:
        return bool(shares().of_whole_elements.get(stage))

    return has_stage(data, is_share)


def common_sources(data: Any) -> list[Any]:
    """Return the arrays that a dataset begins with if a rank reads all of them; [] if unknown, and for other data."""
    found = stages(data) if isinstance(data, tf.data.Dataset) else []
    if not all(stage_name(stage) in COMPLETE and shares().of_whole_elements.get(stage) is None for stage in found):
        return []
    arrays = [array for stage in found if stage_name(stage) == "TensorSlice" for array in stage._tensors]
    return [] if any(array.dtype == tf.variant for array in arrays) else arrays


def split_samples(dataset: Any, partition: Partition, what: str = "sample") -> tuple[Any, Coverage]:
    """Return this rank's elements of a dataset, which are assigned one by one.

    Args:
        what: The name of an element in messages.
    """
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        note = f"1 of every {{size}} {what}s of an endless dataset"
        return dataset.shard(partition.size, partition.rank), _unknown(partition, note)
    if count == tf.data.UNKNOWN_CARDINALITY:
        note = f"1 of every {{size}} {what}s of a dataset of unknown length"
        if not partition.training:
            return dataset.shard(partition.size, partition.rank), _unknown(partition, note)
        return _full_groups(dataset, partition), _unknown(partition, f"{note}, at most {partition.size - 1} dropped")
    partition.require_one_each(count, what)
    coverage = Coverage(len(partition.rows(count)), count, partition.dropped(count), what=what)
    share = select_before_maps(dataset, lambda source: source.take(count - partition.dropped(count)).shard(
        partition.size, partition.rank))
    # tf_keras evaluates data without elements only if their length is unknown.
    return share if coverage.mine else share.filter(lambda *_: True), coverage


def _full_groups(dataset: Any, partition: Partition) -> Any:
    """Assign samples of a dataset of unknown length in groups of one per rank; drop an incomplete last group."""
    unpacked = type(dataset.element_spec) is tuple  # tf.data passes its items as separate arguments

    def pick(*group: Any) -> Any:
        return tf.data.Dataset.zip(tf.nest.map_structure(lambda samples: samples.skip(partition.rank).take(1),
                                                         group if unpacked else group[0]))

    return dataset.window(partition.size, drop_remainder=True).flat_map(pick)


def split_batches(dataset: Any, partition: Partition, first: list[Any]) -> tuple[Any, Coverage]:
    """Return this rank's part of each batch; batches that are too small to contain any of its rows are left out.

    `first` holds the arrays of the first batch: a map() may have changed the number of rows that batch() states.
    """
    rows = batch_size(dataset)
    if partition.training and rows is not None and rows < partition.size:
        raise UsageError(explain("A batch must have at least one row for each rank", "pass to batch() the number of"
                                 " rows of all ranks in a step", batch_size=rows, ranks=partition.size))
    zipped = zipped_batches(dataset)
    first_element = first[: len(tf.nest.flatten(dataset.element_spec))]  # several elements may have been read
    array_rows = [None if found is None else int(found) for found in map(leading_rows, first_element)]
    first_rows = array_rows[0] if array_rows else None
    array_rows = _rows_of_full_batch(dataset, array_rows, zipped, partition)
    known = batches_of(dataset)
    if first_rows is not None and known is not None and first_rows != (known.rows if known.full else known.last):
        rows = known = None
    unpacked = type(dataset.element_spec) is tuple  # tf.data passes its items as separate arguments

    def split(*element: Any) -> Any:
        return _split_batch(element if unpacked else element[0], partition, array_rows, bool(zipped))

    share = dataset.map(split)
    coverage, parts = _zipped_coverage(dataset, zipped, partition, array_rows) if zipped else \
        _batched_coverage(dataset, partition, rows, known)
    mapped_apart = split_before_maps(dataset, partition) if parts != 0 else None
    if mapped_apart is not None and mapped_apart.element_spec == share.element_spec:
        share = mapped_apart
        is_partial = True
    else:
        is_partial = bool(zipped) or static_rows(dataset) is None or not partition.part_size(static_rows(dataset) or 0)
        share = share.filter(_has_rows) if is_partial and parts != 0 else share
    if parts == 0:
        share = share.take(1)  # Keras cannot evaluate without a batch; an empty one changes no metric
    elif is_partial and parts is not None:
        share = share.apply(tf.data.experimental.assert_cardinality(parts))
    elif is_partial and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        share = share.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return share, coverage


def _rows_of_full_batch(dataset: Any, rows: Sequence[int | None], zipped: Sequence[Any],
                        partition: Partition) -> list[int | None]:
    """Return the number of rows of each array in a full batch; their ratio determines the rows that belong together.

    Arrays with different numbers of rows can be split if they were batched separately (`zipped` contains their
    datasets): `tf.data.Dataset.zip` then pairs a number of rows of one with a number of rows of another. For other
    arrays, the rows that belong together are unknown, which is an error.

    `rows` contains the number of rows of each array in the first batch; None for one without rows.
    """
    unmapped = [batch_size(one) for one in zipped_batches(dataset, unmapped=True)
                for _ in tf.nest.flatten(one.element_spec)]
    if len(unmapped) == len(rows) and None not in unmapped:
        rows = [size if count is not None else None for size, count in zip(unmapped, rows, strict=True)]
    found = sorted({count for count in rows if count is not None})
    if len(found) < 2:
        return list(rows)
    sizes = sorted({size for size in map(batch_size, zipped) if size is not None})
    if len(sizes) != len(found) or any(count * sizes[0] != size * found[0]
                                       for count, size in zip(found, sizes, strict=True)):
        raise UsageError(explain("All arrays of a batch must have the same number of rows, or come from datasets that"
                                 " were batched one by one and then zipped", SPLIT_HINT, rows=list(rows)))
    if partition.training and math.gcd(*found) < partition.size:
        raise UsageError(explain("A batch must be split so that every rank gets as many rows of each array as their"
                                 " ratio requires", "choose batch sizes that the number of ranks divides; or "
                                 + SPLIT_HINT,
                                 rows=list(rows), ranks=partition.size))
    return list(rows)


def _zipped_coverage(dataset: Any, zipped: Sequence[Any], partition: Partition,
                      rows: Sequence[int | None]) -> tuple[Coverage, int | None]:
    """Return the coverage of zipped batches, in rows of all arrays, and the number of parts of this rank."""
    found = sorted({count for count in rows if count is not None}) or [1]
    sizes, unit = " and ".join(map(str, found)), math.gcd(*found)
    left = partition.dropped(unit)
    dropped_note = f"{' and '.join(str(count // unit * left) for count in found)} of every {sizes}" if left else ""
    streams, count = [batches_of(one) for one in zipped], int(dataset.cardinality())
    full = [0 if one is None else one.rows for one in streams]
    if count > 0 and all(full) and sorted({size // math.gcd(*full) for size in full}) == [
            size // unit for size in found]:
        last = [one.rows if count <= one.full else one.last for one in streams if one is not None]
        mine, total, parts = 0, 0, 0
        for counts, times in ((full, count - 1), (last, 1)):
            starts, stops = _row_ranges(counts, [size // math.gcd(*full) for size in full], partition, zipped=True)
            part = int(sum(stops)) - int(sum(starts))
            mine, total, parts = mine + times * part, total + times * sum(counts), parts + times * bool(part)
        dropped = total - partition.size * mine if partition.training else 0
        return Coverage(mine, total, dropped, dropped_note, "row"), parts
    at_most = (f", dropped {dropped_note + ', ' if dropped_note else ''}at most {partition.size - 1} rows of each array"
               " of a smaller batch, and smaller batches with an array of fewer rows than ranks"
               ) if partition.training else ""
    whole = "an endless dataset" if count == tf.data.INFINITE_CARDINALITY else "a dataset of unknown length"
    note = f"1/{{size}} of every batch ({sizes} rows) of {whole}{at_most}"
    return _unknown(partition, note), None


def _batched_coverage(dataset: Any, partition: Partition, rows: int | None,
                      known: Batches | None) -> tuple[Coverage, int | None]:
    """Return the coverage of batches of one dataset, and the number of parts of this rank, if known."""
    dropped = partition.dropped(rows or 0)
    note = ""
    if dropped and rows:
        full = rows - dropped
        note = f"{dropped} of every {rows}: a batch of {full} or {full + partition.size} drops none"
    if known is not None:
        found, parts = known.cut(partition)
        return Coverage(found.mine, found.total, found.dropped, note), parts
    is_endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    at_most = f", dropped {note or f'at most {partition.size - 1} per batch'}" if partition.training else ""
    whole = "an endless dataset" if is_endless else "a dataset of unknown length"
    return _unknown(partition, f"1/{{size}} of every batch of {whole}{at_most}"), None


def _unknown(partition: Partition, note: str) -> Coverage:
    return Coverage(None, None, 0, note.format(size=partition.size))


def _split_batch(batch: Any, partition: Partition, full_rows: Sequence[int | None], zipped: bool) -> Any:
    """Return this rank's rows of a batch, in a function of `tf.data`.

    `full_rows` contains the number of rows of each array in a full batch, or is empty if unknown. If `zipped`, the
    arrays may have different numbers of rows.
    """
    arrays = tf.nest.flatten(batch)
    counts = [_static_or_leading_rows(leaf) for leaf in arrays]
    known = [count for count in counts if count is not None]
    ratio = [rows for rows in full_rows if rows is not None]
    if len(known) != len(ratio) or not all(ratio):
        ratio = [1] * len(known)
    unit = math.gcd(*ratio)
    starts, stops = _row_ranges(known, [rows // unit for rows in ratio], partition, zipped)
    indices = iter(zip(starts, stops, strict=True))
    return tf.nest.pack_sequence_as(batch, [leaf if count is None else _slice(leaf, *next(indices))
                                            for leaf, count in zip(arrays, counts, strict=True)])


def _row_ranges(counts: Sequence[Any], ratio: Sequence[int], partition: Partition,
                zipped: bool) -> tuple[list[Any], list[Any]]:
    """Return this rank's first row of each array of a batch, and the row after its last.

    Rows of several arrays belong together in groups: as many rows of each as in `ratio`, which has no common divisor.
    If a batch of `zipped` datasets has another ratio, such as the last one, each array is split separately. For other
    batches, another ratio is an error. The numbers of rows in `counts` are ints or int64 tensors.
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
    if not zipped:
        text = ("All arrays of every batch must have the same number of rows, but they have the following ones. HINT: "
                + SPLIT_HINT)
        with tf.control_dependencies([tf.debugging.Assert(in_ratio, [text, rows], summarize=len(counts))]):
            start, stop = tf.identity(start), tf.identity(stop)
        return [start] * len(counts), [stop] * len(counts)
    first, after = partition.part(rows)
    is_splittable = tf.reduce_all(rows >= partition.size)
    if partition.training:
        after = tf.where(is_splittable, after, first)
    else:  # an array without rows may break the model: one rank gets the whole batch
        mine = partition.rank == partition.size - 1
        first = tf.where(is_splittable, first, tf.zeros_like(rows))
        after = tf.where(is_splittable, after, rows if mine else tf.zeros_like(rows))
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
    counts = [count for count in map(leading_rows, tf.nest.flatten(element)) if count is not None]
    return tf.reduce_any(tf.stack(counts) > 0)


def _static_or_leading_rows(leaf: Any) -> Any:
    static = leaf.shape[0] if isinstance(leaf, tf.Tensor) and leaf.shape.rank else None
    return leading_rows(leaf) if static is None else static


def leading_rows(leaf: Any) -> Any:
    """Return the number of rows of a dense, ragged or sparse tensor, as a tensor; None for a scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.sparse.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0] if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 else None
