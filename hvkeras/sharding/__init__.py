"""Giving each rank its share of the data: `hvd.shard`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import members
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.state import current_job
from hvkeras.sharding.arrays import shard_arrays
from hvkeras.sharding.datasets import shard_dataset
from hvkeras.sharding.partition import Coverage, Partition
from hvkeras.sharding.sequences import shard_sequence


def shard(
    data: Any, training: bool = True, *, shuffle: bool | int = False, seed: int = 0, batched: bool | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives each rank its share of the data; every rank passes the same data, the whole of them.

    The ranks first prove to each other that they do: they compare how much they have, and some of the contents.
    Then each prints a line such as `rank 1: 718 of 1,437, overlap 0, dropped 1`.

    For training every rank gets equally many samples in every step, since the optimizer averages gradients
    without seeing batch sizes; the last `samples mod ranks` are dropped. For evaluation (`training=False`) no
    sample is dropped, none is padded, and ranks may get one more or fewer.

    - Arrays: rank r gets the rows r, r + size, r + 2 size, ...; fit's `batch_size` is that of one rank.
    - A `tf.data.Dataset` of samples is dealt one by one; batch it afterwards, for one rank. One of batches is read
      as batches of all ranks together, and each is cut in equal parts. The first elements are read once more, to
      compare them. Shuffle after dealing (`shuffle=`), or before with a fixed seed.
    - A `keras.utils.PyDataset` or `tf_keras.utils.Sequence`: each rank loads whole batches of its own; only the
      last few, which are not enough for all ranks, are cut in parts. The first and the last batch are loaded on all
      ranks, to compare them; what `on_epoch_end` shuffles is shuffled alike on all ranks.

    Example:
        >>> x_train, y_train = hvd.shard((x_train, y_train))
        >>> x_test, y_test = hvd.shard((x_test, y_test), training=False)
        >>> dataset = hvd.shard(samples, shuffle=10_000).batch(32)
        >>> model.fit(hvd.shard(MyPyDataset(files)))

    Args:
        data: An array (NumPy, TensorFlow, pandas, or what has a length and can be sliced with a step), a tuple, list
            or dict of arrays with equally many rows, a `tf.data.Dataset`, or a `PyDataset` or `Sequence`.
        training: Whether all ranks must get equally many samples; False for validation and evaluation.
        shuffle: For arrays, True permutes all rows alike on every rank before they are dealt, so that ranks do
            not get, say, the even rows of sorted data. For a dataset of samples, the buffer size through which
            each rank shuffles its share, anew in each epoch and in another order than the other ranks.
        seed: Of all shuffling; the same on every rank.
        batched: Whether a dataset's elements are batches, where the pipeline does not tell.
        process_set: The ranks that share the data.

    Returns:
        This rank's share, of the form of `data`; on one rank, `data`.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: Ranks pass different data or arguments, the data are of another kind, the dataset's order
            can differ between ranks, or there are fewer samples than ranks in training.
        PeerError: Reading the data failed on another rank.
    """
    ranks = members(process_set, "shard")
    rank = current_job().topology.rank
    if not isinstance(training, (bool, np.bool_)):
        raise UsageError(explain("training must be True or False", "pass arrays that belong together as one tuple:"
                                 " x, y = hvd.shard((x, y))", training=type(training).__name__))
    deal = Partition(ranks.index(rank), len(ranks), bool(training))
    share, coverage = _shard(data, deal, shuffle, seed, batched, process_set)
    if deal.size > 1 and prints_at(current_job().settings, "WARNING"):
        say(coverage.line(rank))
    return share


def _shard(data: Any, deal: Partition, shuffle: Any, seed: int, batched: bool | None,
           process_set: ProcessSet) -> tuple[Any, Coverage]:
    if isinstance(data, tf.data.Dataset):
        return shard_dataset(data, deal, shuffle, seed, batched, process_set)
    if batched is not None:
        raise UsageError(explain("batched is for a tf.data.Dataset only", "leave batched out", batched=batched,
                                 data=type(data).__name__))
    if compat.batches_base(data) is not None:
        return shard_sequence(data, deal, shuffle, seed, process_set)
    return shard_arrays(data, deal, shuffle, seed, process_set)
