"""Sharding of arrays: rows are assigned to ranks one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvkeras.data.partition import Coverage, Partition
from hvkeras.data.proof import Facts, Hints, fingerprint, require_same_data
from hvkeras.data.structure import count_rows, leaves, map_leaves, require_arrays, take_rows, take_slice
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

HINTS = Hints(
    call="call hvd.shard with the same arguments on every rank",
    amount="pass the whole data to hvd.shard on every rank, and do not split them before",
    order="",
    contents="pass the whole data to hvd.shard on every rank, not a part of them, and shuffle them afterwards with"
    " shuffle=True, or before with the same seed on every rank",
)


def shard_arrays(data: Any, partition: Partition, shuffle: Any, seed: int,
                 process_set: ProcessSet) -> tuple[Any, Coverage]:
    """Returns this rank's rows of a structure of arrays."""
    require_options(shuffle)
    require_arrays(data)
    if partition.size > 1:
        call = f"training={partition.training}, shuffle={shuffle}, seed={seed}"
        require_same_data("shard", lambda: arrays_facts(data, call), lambda: data, HINTS, process_set)
    return split_arrays(data, partition, shuffle, seed)


def split_arrays(data: Any, partition: Partition, shuffle: bool = False, seed: int = 0) -> tuple[Any, Coverage]:
    """Returns this rank's rows of a structure of arrays that all ranks hold."""
    count = count_rows(data)
    partition.require_one_each(count)
    rows = partition.rows(count)
    coverage = Coverage(len(rows), count, partition.dropped(count))
    if shuffle:
        order = np.random.default_rng(seed).permutation(count)[rows.start : rows.stop : rows.step]
        return map_leaves(lambda leaf: take_rows(leaf, order), data), coverage
    if partition.size == 1:
        return data, coverage
    return map_leaves(lambda leaf: take_slice(leaf, rows), data), coverage


def require_options(shuffle: Any) -> None:
    """Checks the options for arrays."""
    if shuffle not in (True, False) or not isinstance(shuffle, (bool, np.bool_)):
        raise UsageError(explain("Arrays must be shuffled as a whole or not at all", "pass shuffle=True, or leave it"
                                 " out, as model.fit shuffles each rank's rows anyway", shuffle=shuffle))


def arrays_facts(data: Any, call: str) -> Facts:
    """Returns the facts about a rank's arrays that all ranks compare."""
    return Facts(f"{len(leaves(data))} arrays, {call}", f"{count_rows(data):,} samples", "", fingerprint(data))
