"""Sharding of data between ranks: `hvd.shard`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.global_batch import require_own_batches
from hvkeras.collectives.operations import members
from hvkeras.data.accounts import keeps_accounts
from hvkeras.data.datasets import shard_dataset
from hvkeras.data.partition import Coverage, Partition, shard_arrays
from hvkeras.data.resharding import Arrays, remember_arrays, remember_batches, shares
from hvkeras.data.sequences import shard_sequence
from hvkeras.data.structure import map_leaves
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session

DataT = TypeVar("DataT")


def shard(
    data: DataT, training: bool = True, *, shuffle: bool | int = False, seed: int = 0, batched: bool | None = None,
    by: Literal["rows", "elements"] = "rows", process_set: ProcessSet = global_process_set,
) -> DataT:
    """Return this rank's shard of the data; every rank passes the same, complete data.

    The ranks first verify that their data are equal: they compare the amount of data and some of the contents. The
    first rank then prints a line such as `shard: 2 ranks x 718 of 1,437 samples, 1 dropped`.

    For training, every rank gets the same number of samples in every step, since the optimizer averages gradients
    regardless of batch sizes; the last `samples mod ranks` samples are dropped. For evaluation (`training=False`), no
    sample is dropped or padded, and some ranks may get one sample more than others.

    - Arrays: rank r gets the rows r, r + size, r + 2 size, ...; the `batch_size` of `fit` is per rank.
    - `tf.data.Dataset`: samples are assigned to the ranks one by one; batch the shard afterwards, per rank. If the
      elements are batches, each is the batch of all ranks together and split into equal parts. The first elements are
      read one more time for the comparison. Shuffle after sharding (`shuffle=`), or before it: shuffles without a seed
      get the same one on all ranks if hvkeras knows the stages after them. If the dataset maps and then batches, each
      rank maps its own rows only, unless a function has state, such as `tf.py_function`.
    - `keras.utils.PyDataset` or `tf_keras.utils.Sequence`: each rank loads separate whole batches; only the last few
      batches, too few for all ranks, are split. All ranks load the first and the last batch for the comparison. If
      `on_epoch_end` shuffles, it does so equally on all ranks. If it changes the number of batches, equally on all
      ranks, they are assigned again.

    All arrays of a batch, dense, ragged or sparse, must have the same number of rows. Batches of datasets that were
    batched separately and then zipped (16 labelled rows and 48 unlabelled ones) are split array by array: rank r of n
    gets the r-th n-th of each.

    Elements that cannot be split, such as graphs with their nodes, are assigned whole with `by="elements"`: each rank
    takes every n-th element. Ranks then have different numbers of rows in a step. In `fit`, metrics and the gradients
    of losses that are means over rows are weighted by these numbers. For training, the last `elements mod ranks`
    elements are dropped; in an evaluation of a dataset, some ranks may get no element.

    Example:
        >>> x_train, y_train = hvd.shard((x_train, y_train))
        >>> x_test, y_test = hvd.shard((x_test, y_test), training=False)
        >>> dataset = hvd.shard(samples, shuffle=10_000).batch(32)
        >>> model.fit(hvd.shard(MyPyDataset(files)))
        >>> model.fit(hvd.shard(graphs, by="elements"))

    Args:
        data: An array (NumPy, TensorFlow, pandas, or any object that has a length and can be sliced with a step), a
            tuple, list or dict of arrays with the same number of rows, a `tf.data.Dataset`, or a `PyDataset` or
            `Sequence`.
        training: Whether all ranks must get the same number of samples; False for validation and evaluation.
        shuffle: For arrays, True applies the same permutation of all rows on every rank before sharding, so that no
            rank gets, for example, the even rows of sorted data. For a dataset of samples, the size of the buffer with
            which each rank shuffles its shard, in a new order per epoch and rank.
        seed: The seed of all shuffling; the same on every rank. In an elastic job, also of the shuffles of a dataset.
        batched: Whether the elements of a dataset are batches, if that cannot be derived from the pipeline.
        by: The unit to assign: `"rows"`, or whole `"elements"` of a dataset, or whole batches of a `PyDataset` or
            `Sequence`.
        process_set: The ranks that share the data.

    Returns:
        This rank's shard, of the same kind as `data`; on one rank, `data`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: Ranks pass different data or arguments, the kind of data is not supported, the dataset's order can
            differ between ranks, the arrays of a batch cannot be split alike, or there are fewer samples or
            elements than ranks in training.
        PeerError: Reading the data failed on another rank.
    """
    require_own_batches("shard")
    ranks = members(process_set, "shard")
    rank = current_session().topology.rank
    if not isinstance(training, (bool, np.bool_)):
        raise UsageError(explain("training must be True or False", "pass arrays that belong together as one tuple:"
                                 " x, y = hvd.shard((x, y))", training=type(training).__name__))
    partition = Partition(ranks.index(rank), len(ranks), bool(training))
    share: DataT
    if by not in ("rows", "elements"):
        raise UsageError(explain("by must be rows or elements", 'leave it out, or pass by="elements"', by=by))
    share, coverage = _shard(data, partition, shuffle, seed, batched, by == "elements", process_set)
    if partition.size > 1 and partition.rank == 0 and prints_at(current_session().settings, "WARNING"):
        say(coverage.line(partition.size))
    return share


def _shard(data: Any, partition: Partition, shuffle: Any, seed: int, batched: bool | None, whole: bool,
           process_set: ProcessSet) -> tuple[Any, Coverage]:
    if isinstance(data, tf.data.Dataset):
        share, coverage = shard_dataset(data, partition, shuffle, seed, batched, whole, process_set)
        shares().of_whole_elements[share] = whole
        return share, coverage
    if batched is not None:
        raise UsageError(explain("batched is for a tf.data.Dataset only", "leave batched out", batched=batched,
                                 data=type(data).__name__))
    if compat.batches_base(data) is not None:
        batches, coverage = shard_sequence(data, partition, shuffle, seed, whole, process_set)
        if keeps_accounts() and process_set is global_process_set:
            remember_batches(batches, data, partition.training, seed, process_set)
        return batches, coverage
    if whole:
        raise UsageError(explain("Only a tf.data.Dataset, a PyDataset or a Sequence has elements that can be assigned"
                                 " whole", "leave by out: arrays are assigned row by row", by="elements",
                                 data=type(data).__name__))
    share, coverage = shard_arrays(data, partition, shuffle, seed, process_set)
    if keeps_accounts() and process_set is global_process_set:
        if partition.size == 1:  # copied, so that the shard is a different object than the data
            share = map_leaves(lambda leaf: leaf[:] if isinstance(leaf, np.ndarray) else leaf, share)
        remember_arrays(share, Arrays(data, partition.training, bool(shuffle), seed))
        coverage = replace(coverage, dropped=0)
    return share, coverage
