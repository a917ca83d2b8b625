"""Batches for custom elastic training loops, in which each sample is used once per epoch although ranks change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvkeras.data.accounts import keeps_accounts
from hvkeras.data.resharding import accounted
from hvkeras.data.sequences import Share
from hvkeras.errors import UsageError, explain


def batches(x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int = 32,
            shuffle: bool = True) -> Iterator[Any]:
    """Yield the remaining batches of one epoch of data that was sharded with `hvd.shard`.

    After a change of ranks, the next call yields the samples that no rank had used by the last commit. Commit after a
    step, not between a batch and its step. In jobs whose ranks do not change, every call yields a full epoch.

    Example:
        x, y = hvd.shard((x, y))

        @hvd.elastic.run
        def train(state):
            while state.epoch < 10:
                for features, labels in hvd.elastic.batches(x, y, batch_size=32):
                    step(features, labels)
                    state.batch += 1
                    if state.batch % 100 == 0:
                        state.commit()
                state.epoch += 1
                state.commit()

    Args:
        x: Array, structure of arrays, batched `tf.data.Dataset` or `PyDataset`, as returned by `hvd.shard`.
        y: Targets from the same shard, or None.
        sample_weight: Sample weights from the same shard, or None.
        batch_size: Samples per batch on this rank; ignored for datasets.
        shuffle: Whether to shuffle arrays in each epoch, in the same order on all ranks.

    Yields:
        Tensors: `x`, `(x, y)` or `(x, y, sample_weight)`; for a dataset, its elements.

    Raises:
        UsageError: The ranks may change, and the data were not sharded with `hvd.shard`.
    """
    if not keeps_accounts():
        yield from _plain(x, y, sample_weight, batch_size, shuffle)
        return
    data = accounted(x, y, sample_weight, batch_size, shuffle)
    if data is None:
        raise UsageError(explain("Elastic batches must come from hvd.shard", "pass the result of hvd.shard, or a"
                                 " dataset that only maps, batches and prefetches it", x=type(x).__name__))
    account = data.account
    first, remaining = account.begin(data.batch, data.drops), account.steps(data.batch, drops=data.drops)
    for number, batch in enumerate(itertools.islice(x if data.dataset is None else data.dataset, remaining), start=1):
        account.record_steps(first + number)  # the step of this batch runs before the next commit
        yield batch if y is not None or sample_weight is not None or data.dataset is None else batch[0]
    account.end()
    data.end_pass()


def _plain(x: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool) -> Iterator[Any]:
    if isinstance(x, tf.data.Dataset):
        yield from x
        return
    if isinstance(x, Share):
        yield from (x[step] for step in range(len(x)))
        x.on_epoch_end()
        return
    arrays = x if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.shuffle(int(dataset.cardinality())) if shuffle else dataset
    yield from dataset.batch(batch_size)
