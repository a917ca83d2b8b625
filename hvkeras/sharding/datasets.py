"""Sharding of a `tf.data.Dataset`: its samples one by one, or the rows of each of its batches."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet
from hvkeras.sharding.accounts import keeps_accounts
from hvkeras.sharding.partition import Coverage, Partition
from hvkeras.sharding.pipeline import (
    batch_size,
    batches_of,
    has_scalars,
    is_batched,
    is_nondeterministic,
    shuffle_seeds,
    static_rows,
)
from hvkeras.sharding.proof import Facts, Hints, fingerprint, require_same_data
from hvkeras.sharding.redealing import dealt_dataset

FIX = ("shard first and shuffle after it, hvd.shard(dataset, shuffle=1000).batch(32), or give shuffle() the same seed"
       " on every rank, after the same tf.random.set_seed or keras.utils.set_random_seed")
HINTS = Hints(
    call="call hvd.shard with the same arguments on every rank",
    amount="pass the whole dataset to hvd.shard on every rank, and do not split it before",
    order=FIX,
    contents="pass the whole dataset to hvd.shard on every rank, not a part of it; and " + FIX,
)
FIRST_ELEMENTS = 8  # compared between ranks in an unbatched dataset; in a batched one, only the first is


def shard_dataset(
    dataset: Any, partition: Partition, shuffle: Any, seed: int, batched: bool | None, process_set: ProcessSet
) -> tuple[Any, Coverage]:
    """Returns this rank's share of a dataset."""
    _require_options(shuffle, batched)
    if partition.size == 1 and not keeps_accounts():
        return _shuffled(dataset, shuffle, seed), Coverage(None, None, 0, "the whole dataset")
    call = f"training={partition.training}, shuffle={shuffle}, seed={seed}, batched={batched}"
    comparable, first = require_same_dataset("shard", dataset, call, process_set)
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
        share = dealt_dataset(dataset, fingerprint(first), int(dataset.cardinality()), shuffle, seed)
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

    def describe() -> Facts:
        if (0, 0) in seeds:
            raise UsageError(explain("A dataset that all ranks share must be read in the same order on all ranks, but"
                                     " shuffle() without a seed gives each rank its own", FIX, dataset=type(dataset)
                                     .__name__))
        if is_nondeterministic(dataset):
            raise UsageError(explain("A dataset that all ranks share must be read in the same order on all ranks",
                                     "remove deterministic=False from the dataset's options, map, batch and"
                                     " interleave; it may be set after hvd.shard", deterministic=False))
        first.extend(_first(dataset))
        return Facts(f"{dataset.element_spec}, {call}", f"{amounts.get(count, f'{count:,}')} elements",
                     f"seeds of shuffles {seeds}", fingerprint(first))

    return require_same_data(name, describe, lambda: _first(dataset), HINTS, process_set), first


def _first(dataset: Any) -> list[Any]:
    """Returns the arrays of the elements that are compared between ranks."""
    count = 1 if is_batched(dataset) else FIRST_ELEMENTS
    return [tf.expand_dims(leaf, 0) if isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0 else leaf
            for element in itertools.islice(dataset, count) for leaf in tf.nest.flatten(element)]


def _require_options(shuffle: Any, batched: Any) -> None:
    if shuffle is True or not isinstance(shuffle, int) or shuffle < 0:
        raise UsageError(explain("A dataset is shuffled through a buffer of so many samples",
                                 "pass shuffle=1000, or another number of samples", shuffle=shuffle))
    if batched not in (None, True, False):
        raise UsageError(explain("batched must be True, False or None", "leave it out", batched=batched))


def _shuffled(dataset: Any, buffer_size: int, seed: int) -> Any:
    return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=True) if buffer_size else dataset


def split_samples(dataset: Any, partition: Partition) -> tuple[Any, Coverage]:
    """Returns this rank's samples of an unbatched dataset, which are assigned to the ranks one by one."""
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        note = "1 of every {size} samples of an endless dataset"
        return dataset.shard(partition.size, partition.rank), _unknown(partition, note)
    if count == tf.data.UNKNOWN_CARDINALITY:
        note = "1 of every {size} samples of a dataset of unknown length, overlap 0, dropped "
        if not partition.training:
            return dataset.shard(partition.size, partition.rank), _unknown(partition, note + "0")
        return _full_groups(dataset, partition), _unknown(partition, note + f"at most {partition.size - 1}")
    if partition.training and count < partition.size:
        raise UsageError(explain("Training needs at least one sample per rank", "start fewer ranks, or train without"
                                 " hvd.shard", samples=count, ranks=partition.size))
    coverage = Coverage(len(partition.rows(count)), count, partition.dropped(count))
    return dataset.take(count - partition.dropped(count)).shard(partition.size, partition.rank), coverage


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
    known = batches_of(dataset)
    if first and known is not None and int(leading_rows(first[0])) != (known.rows if known.full else known.last):
        rows = known = None
    unpacked = type(dataset.element_spec) is tuple  # then tf.data passes its items as separate arguments
    share = dataset.map(lambda *element: _cut(element if unpacked else element[0], partition))
    if known is not None and not known.cut(partition)[1]:
        share = share.take(1)  # Keras cannot evaluate without a batch, and an empty one adds nothing to any metric
    elif static_rows(dataset) is None or not partition.part_size(static_rows(dataset) or 0):
        share = share.filter(lambda *element: leading_rows(tf.nest.flatten(element)[0]) > 0)
        if known is not None:
            share = share.apply(tf.data.experimental.assert_cardinality(known.cut(partition)[1]))
        elif int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            share = share.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return share, _batches_coverage(dataset, partition, rows, known)


def _batches_coverage(dataset: Any, partition: Partition, rows: int | None, known: Any) -> Coverage:
    wasted = partition.dropped(rows or 0)
    note = f"{wasted} of every {rows}: a batch of {rows - wasted} or {rows - wasted + partition.size} drops none" \
        if wasted and rows else ""
    if known is not None:
        found = known.cut(partition)[0]
        return Coverage(found.mine, found.total, found.dropped, note)
    endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    most = f"at most {partition.size - 1} per batch" if partition.training else "0"
    whole = "an endless dataset" if endless else "a dataset of unknown length"
    return _unknown(partition, f"1/{{size}} of every batch of {whole}, overlap 0, dropped {note or most}")


def _unknown(partition: Partition, note: str) -> Coverage:
    return Coverage(None, None, 0, note.format(size=partition.size))


def _cut(batch: Any, partition: Partition) -> Any:
    """Returns this rank's rows of a batch."""
    leaf = tf.nest.flatten(batch)[0]
    static = leaf.shape[0] if leaf.shape.rank else None
    start, stop = partition.part(static if static is not None else leading_rows(leaf))
    return tf.nest.map_structure(lambda rows: _slice(rows, start, stop), batch)


def _slice(rows: Any, start: Any, stop: Any) -> Any:
    if not isinstance(rows, tf.sparse.SparseTensor):
        return rows[start:stop]
    zeros = tf.zeros_like(rows.dense_shape)
    first = tf.concat([[tf.cast(start, tf.int64)], zeros[1:]], 0)
    return tf.sparse.slice(rows, first, tf.concat([[tf.cast(stop - start, tf.int64)], rows.dense_shape[1:]], 0))


def leading_rows(leaf: Any) -> Any:
    """Returns the number of rows of a dense, ragged or sparse tensor, as a tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return leaf.dense_shape[0] if isinstance(leaf, tf.sparse.SparseTensor) else tf.shape(leaf, tf.int64)[0]

