"""Data of elastic jobs, which are assigned to the ranks again after a membership change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.data.accounts import Account, accounts, rounded_marks
from hvkeras.data.consistency import fingerprint
from hvkeras.data.partition import Batches, Partition, split_arrays
from hvkeras.data.pipeline import batching_to
from hvkeras.data.sequences import EpochEnd, Share, require_rows, split_sequence
from hvkeras.data.shuffles import in_order_of_pass
from hvkeras.data.structure import IdentityMap, concatenate, count_rows, leaves, spec_of_rows, take_rows, take_slice
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session, this_process

CHUNK, MOST_AT_ONCE = 1024**2, 64  # bytes and batches to read at once


class Arrays:
    """Arrays that `hvd.shard` has assigned."""

    def __init__(self, data: Any, training: bool, shuffle: bool, seed: int) -> None:
        self.training = training
        self.whole: list[Any] = leaves(data)
        self._data, self._shuffle, self._seed = data, shuffle, seed
        count = count_rows(data)
        self.account: Account = accounts().account(("arrays", rounded_marks(fingerprint(data)), shuffle), count, seed)
        self._base = np.random.default_rng(seed).permutation(count) if shuffle else None
        self._current_share: tuple[tuple[int, int], list[Any]] | None = None

    def rows(self, shuffles: bool) -> Any:
        """Return the rows of this rank in the remaining pass, an int64 array in the order of its steps."""
        done, usable, size, rank = self.account.share(all_of_them=True)
        order = self.account.order(shuffles)[done : done + usable][rank::size]
        return order if self._base is None else self._base[order]

    def current(self) -> list[Any]:
        """Return this rank's current share, for evaluation: one array for each of the complete ones."""
        topology = current_session().topology
        index = topology.rank, topology.size
        if self._current_share is None or self._current_share[0] != index:
            share, _ = split_arrays(self._data, Partition(*index, self.training), self._shuffle, self._seed)
            self._current_share = index, leaves(share)
        return self._current_share[1]


@dataclass(frozen=True)
class _AssignedRows:
    """Origin of an array of a share: the complete arrays, and its index among them."""

    source: Arrays
    index: int


class ShardOrigins:
    """Origins of the shares that `hvd.shard` has made in this process, while they exist.

    Attributes:
        arrays: The complete arrays of an array.
        datasets: The account of a dataset of samples.
        of_whole_elements: For a dataset that is a shard, whether it has whole elements.
    """

    def __init__(self) -> None:
        self.arrays: IdentityMap[_AssignedRows] = IdentityMap()
        self.datasets: IdentityMap[Account] = IdentityMap()
        self.of_whole_elements: IdentityMap[bool] = IdentityMap()


def shares() -> ShardOrigins:
    """Return the origins of the shares in this process."""
    return this_process().part(ShardOrigins)


def remember_arrays(share: Any, source: Arrays) -> None:
    """Record the complete arrays that a share comes from, while the share exists."""
    for index, leaf in enumerate(leaves(share)):
        if leaf is not None:
            shares().arrays[leaf] = _AssignedRows(source, index)


def resharded(data: Any) -> Any:
    """Return the current share of data that `hvd.shard` has assigned for evaluation; other data unchanged."""
    def current(leaf: Any) -> Any:
        if isinstance(leaf, Share) and leaf.assigned is not None and not leaf.assigned.training:
            return leaf.assigned.current()
        found = shares().arrays.get(leaf)
        return leaf if found is None or found.source.training else found.source.current()[found.index]

    if data is None or isinstance(data, tf.data.Dataset):
        return data
    return tf.nest.map_structure(current, data)


@dataclass(frozen=True)
class Data:
    """Data for `fit` that begin at the position of the account.

    Attributes:
        batch: The samples per step of this rank.
        drops: Whether a last step with fewer samples is dropped.
        dataset: The dataset for `fit`; None to keep its arguments.
        end_pass: Called at the end of a pass.
    """

    account: Account
    batch: int
    drops: bool = False
    dataset: Any = None
    end_pass: Callable[[], None] = lambda: None


def accounted(x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool) -> Data | None:
    """Return data for `fit` that are assigned again in each pass; None if this is not supported.

    Args:
        x: As for `fit`.
        y: As for `fit`.
        sample_weight: As for `fit`.
        batch_size: As for `fit`.
        shuffle: As for `fit`.
    """
    if isinstance(x, tf.data.Dataset):
        return _accounted_dataset(x)
    if isinstance(x, Share):
        return _accounted_batches(x, shuffle)
    given = (x,) if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    found = [shares().arrays.get(leaf) for leaf in tf.nest.flatten(given) if leaf is not None]
    assigned = [one for one in found if one is not None and one.source.training]
    if not assigned or len(assigned) < len(found) or len({one.source.account.count for one in assigned}) > 1:
        return None
    source, batch = assigned[0].source, batch_size or 32
    whole = [one.source.whole[one.index] for one in assigned]
    specs = [spec_of_rows(leaf) for leaf in whole]
    if None in specs or any(leaf is None for leaf in tf.nest.flatten(given)):
        return None
    dataset = _dataset_of(whole, specs, given, lambda: source.rows(shuffle), source.account, batch)
    return Data(source.account, batch, dataset=dataset)


def _dataset_of(whole: Sequence[Any], specs: Sequence[Any], structure: Any, rows: Callable[[], Any], account: Account,
                batch: int) -> Any:
    """Return the batches of a pass; the last one contains the remaining rows, up to one more than `batch`.

    Several batches are read at once: a call of Python takes as long as reading a small one.
    """
    python_indices = [index for index, leaf in enumerate(whole) if not tf.is_tensor(leaf)]
    dtypes = [specs[index].dtype for index in python_indices]
    at_once = min(MOST_AT_ONCE, max(1, CHUNK // max(1, batch * sum(_bytes_of_row(spec) for spec in specs))))

    def read(indices: Any, steps: Any) -> Any:
        found = tf.numpy_function(lambda some: [
            np.asarray(take_rows(whole[index], some), dtype.as_numpy_dtype)
            for index, dtype in zip(python_indices, dtypes, strict=True)], [indices], dtypes) if python_indices else []
        picked = dict(zip(python_indices, found, strict=True))
        parts = [tf.ensure_shape(picked[index], spec.shape) if index in picked else tf.gather(whole[index], indices)
                 for index, spec in enumerate(specs)]
        return tf.nest.pack_sequence_as(structure, [_in_steps(part, steps) for part in parts])

    def chunks(_: Any) -> Any:
        mine = tf.ensure_shape(tf.numpy_function(rows, [], tf.int64), [None])
        steps = tf.ensure_shape(tf.numpy_function(lambda: np.int64(account.steps(batch)), [], tf.int64), [])
        full = tf.maximum(steps - 1, 0)  # the last step is a separate chunk, as its size may differ

        def part(chunk: Any) -> Any:
            first = tf.minimum(chunk * at_once, full)
            after = tf.where(first == full, steps, tf.minimum(first + at_once, full))
            return mine[first * batch : tf.where(after == steps, tf.size(mine, tf.int64), after * batch)], after - first

        return tf.data.Dataset.range(tf.where(steps == 0, steps, 1 - (-full // at_once))).map(part)

    return tf.data.Dataset.range(1).flat_map(chunks).map(read).prefetch(1).unbatch().prefetch(2)


def _in_steps(part: Any, steps: Any) -> Any:
    """Add a dimension for the steps in front of the rows."""
    shape = tf.shape(part, tf.int64)
    cut = tf.reshape(part, tf.concat([[steps, shape[0] // steps], shape[1:]], axis=0))
    return tf.ensure_shape(cut, [None, None, *part.shape[1:]])


def _bytes_of_row(spec: Any) -> int:
    return int((spec.shape[1:].num_elements() or 1) * spec.dtype.size)


def resharded_dataset(dataset: Any, marks: Any, count: int, buffer_size: int, seed: int) -> Any:
    """Return the share of an unbatched dataset, which each pass reads for the current rank of this process.

    Args:
        marks: The fingerprint of its first samples.
        buffer_size: The buffer size of the shuffle of all samples; 0 for none.
    """
    account = accounts().account(("dataset", rounded_marks(marks), buffer_size), count, seed)

    def numbers() -> Any:
        return np.asarray([*account.share(), seed + account.passes], np.int64)

    def remaining(_: Any) -> Any:
        # Not tf.unstack, at which TensorFlow 2.21 crashes here.
        position = tf.ensure_shape(tf.numpy_function(numbers, [], tf.int64), [5])
        whole = in_order_of_pass(dataset, seed, position[4])
        if buffer_size:
            whole = whole.shuffle(buffer_size, seed=position[4], reshuffle_each_iteration=False)
        return whole.skip(position[0]).take(position[1]).shard(position[2], position[3])

    share = tf.data.Dataset.range(1).flat_map(remaining)
    shares().datasets[share] = account
    return share


def remember_batches(share: Any, data: Any, training: bool, seed: int, process_set: ProcessSet) -> None:
    """Record the origin of a share of batches, if their number is known."""
    if share.batches is not None:
        share.assigned = ReshardedBatches(data, share, training, seed, EpochEnd(data, seed, process_set))


def _accounted_batches(share: Share, shuffle: bool) -> Data | None:
    if share.assigned is None or not share.assigned.training or (dataset := share.assigned.dataset(shuffle)) is None:
        return None
    return Data(share.assigned.account, share.assigned.batches.rows, dataset=dataset, end_pass=share.assigned.end_pass)


def _accounted_dataset(dataset: Any) -> Data | None:
    """Return the data of a dataset that only batches samples which `hvd.shard` has assigned; else None."""
    datasets = shares().datasets
    source, batch, drops = batching_to(dataset, lambda stage: datasets.get(stage) is not None)
    account = None if source is None else datasets.get(source)
    return None if account is None or batch is None else Data(account, batch, drops)


Pieces = list[tuple[int, int, int]]  # the parts of batches of one step: batch, first row, row after the last
PLANS_TO_KEEP = 2  # plans of passes to keep: one may be read while the next one begins


class ReshardedBatches:
    """Batches that `hvd.shard` has assigned.

    Args:
        training: As for `hvd.shard`.
        seed: As for `hvd.shard`.
        end: Ends an epoch of the data.
    """

    def __init__(self, data: Any, share: Share, training: bool, seed: int, end: EpochEnd) -> None:
        assert share.batches is not None
        self.training = training
        self.batches: Batches = share.batches
        self.account: Account = accounts().account(
            ("batches", type(data).__name__, rounded_marks(share.marks)), self.batches.total, seed)
        self._data, self._seed, self._end = data, seed, end
        self._ended = 0  # calls of the data's on_epoch_end
        self._first = data[0]
        self._plans: dict[int, list[Pieces]] = {}
        self._numbers = itertools.count()

    def plan(self, shuffles: bool) -> list[Pieces]:
        """Return the pieces of batches for each remaining step of this rank in the pass."""
        account, rows = self.account, self.batches.rows
        topology = current_session().topology
        order = (np.random.default_rng([self._seed, account.passes]).permutation(self.batches.full) if shuffles
                 else np.arange(self.batches.full))[account.done // rows :]
        batches_in_rounds = len(order) // topology.size * topology.size
        own = order[topology.rank : batches_in_rounds : topology.size]
        steps: list[Pieces] = [[(int(batch), 0, rows)] for batch in own]
        rest = [(int(batch), rows) for batch in order[batches_in_rounds:]]
        rest += [(self.batches.full, self.batches.last)] if self.batches.last else []
        start, stop = Partition(topology.rank, topology.size, True).part(sum(count for _, count in rest))
        pieces, before = [], 0
        for batch, count in rest:
            first, after = max(start - before, 0), min(stop - before, count)
            if first < after:
                pieces.append((batch, first, after))
            before += count
        return [*steps, pieces] if pieces else steps

    def dataset(self, shuffles: bool) -> Any:
        """Return the batches of a pass, read with the `workers` of the data; None if types are unknown.

        Args:
            shuffles: Whether each pass has a new order of batches.
        """
        flat = tf.nest.flatten(self._first)
        specs = [spec_of_rows(leaf) for leaf in flat]
        if None in specs:
            return None

        def begin() -> Any:
            self._replay_epoch_ends()
            self._require_same_count()
            number = next(self._numbers)
            self._plans[number] = self.plan(shuffles)
            self._plans.pop(number - PLANS_TO_KEEP, None)
            return np.asarray([number, len(self._plans[number])], np.int64)

        def load(number: Any, step: Any) -> list[Any]:
            return [np.asarray(leaf, spec.dtype.as_numpy_dtype)
                    for leaf, spec in zip(self._step(self._plans[int(number)][int(step)]), specs, strict=True)]

        def loaded(number: Any, step: Any) -> Any:
            read = tf.numpy_function(load, [number, step], [spec.dtype for spec in specs])
            return tf.nest.pack_sequence_as(self._first, [tf.ensure_shape(leaf, spec.shape)
                                                          for leaf, spec in zip(read, specs, strict=True)])

        def steps(_: Any) -> Any:
            begun = tf.ensure_shape(tf.numpy_function(begin, [], tf.int64), [2])
            return tf.data.Dataset.range(begun[1]).map(lambda step: (begun[0], step))

        workers = max(1, int(getattr(self._data, "workers", 1) or 1))
        return tf.data.Dataset.range(1).flat_map(steps).map(loaded, num_parallel_calls=workers,
                                                            deterministic=True).prefetch(2)

    def end_pass(self) -> None:
        """End an epoch of the data on all ranks."""
        self._ended += 1
        self._end(self._ended)

    def current(self) -> Any:
        """Return this rank's current share, for evaluation."""
        topology = current_session().topology
        share, _ = split_sequence(self._data, Partition(topology.rank, topology.size, self.training), self.batches,
                                  self.batches.rows, self._seed, self._end)
        return share

    def _replay_epoch_ends(self) -> None:
        """Replay the epoch ends of the data in a process that joined later."""
        if self._ended > self.account.passes and compat.overrides(self._data, "on_epoch_end"):
            session = current_session()
            if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
                say("on_epoch_end of the data cannot be undone: samples of a repeated epoch may be read twice or"
                    " not at all. HINT: commit at the end of each epoch")
        while self._ended < self.account.passes:
            self._ended += 1
            self._end.apply(self._ended)
        if hasattr(self._data, "on_epoch_begin"):
            self._data.on_epoch_begin()

    def _require_same_count(self) -> None:
        count, before = compat.count_batches(self._data), self.batches.full + bool(self.batches.last)
        if count != before:
            raise UsageError(explain("In an elastic job, data that hvd.shard has assigned must keep the number of their"
                                     " batches", "change the contents of batches in on_epoch_end, not __len__",
                                     batches=count, before=before))

    def _step(self, pieces: Pieces) -> list[Any]:
        """Return the leaves of the batch of a step."""
        parts = []
        for batch, first, after in pieces:
            loaded = self._data[batch]
            if batch < self.batches.full:
                require_rows(loaded, batch, self.batches.rows)
            found, whole = leaves(loaded), (first, after) == (0, self.batches.rows)
            parts.append(found if whole else [take_slice(leaf, slice(first, after)) for leaf in found])
        return parts[0] if len(parts) == 1 else [concatenate(each) for each in zip(*parts, strict=True)]
