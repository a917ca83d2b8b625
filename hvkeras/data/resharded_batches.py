"""A `PyDataset` or `Sequence` whose batches are dealt again after a change of an elastic job's ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.data.accounts import Account, accounts, rough
from hvkeras.data.partition import Batches, Partition
from hvkeras.data.sequences import EpochEnd, Share, require_rows, split_sequence
from hvkeras.data.structure import concatenate, leaves, spec_of_rows, take_slice
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session

Pieces = list[tuple[int, int, int]]  # the parts of batches of one step: batch, first row, row after the last
KEPT = 2  # plans of passes: one may be read while the next one begins


class DealtBatches:
    """Batches that `hvd.shard` has dealt.

    Args:
        data: The whole data.
        share: This rank's share in the beginning.
        training: As for `hvd.shard`.
        seed: As for `hvd.shard`.
        end: Ends an epoch of the data.
    """

    def __init__(self, data: Any, share: Share, training: bool, seed: int, end: EpochEnd) -> None:
        assert share.batches is not None
        self.training = training
        self.batches: Batches = share.batches
        self.account: Account = accounts().account(
            ("batches", type(data).__name__, rough(share.marks)), self.batches.total, seed)
        self._data, self._seed, self._end = data, seed, end
        self._ended = 0  # how often the data's own end of an epoch was called
        self._first = data[0]
        self._plans: dict[int, list[Pieces]] = {}
        self._numbers = itertools.count()

    def plan(self, shuffles: bool) -> list[Pieces]:
        """Returns what this rank trains on in each step of what is left of the pass."""
        account, rows = self.account, self.batches.rows
        topology = current_session().topology
        order = (np.random.default_rng([self._seed, account.passes]).permutation(self.batches.full) if shuffles
                 else np.arange(self.batches.full))[account.done // rows :]
        in_rounds = len(order) // topology.size * topology.size
        steps: list[Pieces] = [[(int(batch), 0, rows)] for batch in order[topology.rank : in_rounds : topology.size]]
        rest = [(int(batch), rows) for batch in order[in_rounds:]]
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
        """Returns the batches of a pass, read by as many threads as the data have workers; None if types are unknown.

        Args:
            shuffles: Whether the order of the batches is new in each pass.
        """
        flat = tf.nest.flatten(self._first)
        specs = [spec_of_rows(leaf) for leaf in flat]
        if None in specs:
            return None

        def begin() -> Any:
            self._catch_up()
            self._require_same_number()
            number = next(self._numbers)
            self._plans[number] = self.plan(shuffles)
            self._plans.pop(number - KEPT, None)
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
        """Ends an epoch of the data, on all ranks alike."""
        self._ended += 1
        self._end(self._ended)

    def current(self) -> Any:
        """Returns this rank's share now, for evaluation."""
        topology = current_session().topology
        share, _ = split_sequence(self._data, Partition(topology.rank, topology.size, self.training), self.batches,
                                  self.batches.rows, self._seed, self._end)
        return share

    def _catch_up(self) -> None:
        """Makes the data what they are after so many epochs, in a process that has not been there from the start."""
        if self._ended > self.account.passes and compat.overrides(self._data, "on_epoch_end"):
            session = current_session()
            if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
                say("on_epoch_end of the data cannot be undone: samples of an epoch that is repeated may come twice, or"
                    " not at all. HINT: commit at the end of each epoch")
        while self._ended < self.account.passes:
            self._ended += 1
            self._end.apply(self._ended)
        if hasattr(self._data, "on_epoch_begin"):
            self._data.on_epoch_begin()

    def _require_same_number(self) -> None:
        count, before = compat.count_batches(self._data), self.batches.full + bool(self.batches.last)
        if count != before:
            raise UsageError(explain("In an elastic job, data that hvd.shard has dealt must keep the number of their"
                                     " batches", "change the contents of batches in on_epoch_end, not __len__",
                                     batches=count, before=before))

    def _step(self, pieces: Pieces) -> list[Any]:
        """Returns the leaves of a step's batch."""
        parts = []
        for batch, first, after in pieces:
            loaded = self._data[batch]
            if batch < self.batches.full:
                require_rows(loaded, batch, self.batches.rows)
            found, whole = leaves(loaded), (first, after) == (0, self.batches.rows)
            parts.append(found if whole else [take_slice(leaf, slice(first, after)) for leaf in found])
        return parts[0] if len(parts) == 1 else [concatenate(each) for each in zip(*parts, strict=True)]
