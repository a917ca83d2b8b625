"""Sharding of a `keras.utils.PyDataset` or `tf_keras.utils.Sequence`: whole batches, and parts of the last ones."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.compat import patches
from hvkeras.data.accounts import keeps_accounts
from hvkeras.data.consistency import DataFacts, Hints, common_randomness, fingerprint, require_same_data
from hvkeras.data.partition import Batches, Coverage, Partition
from hvkeras.data.structure import concatenate, count_rows, map_leaves, take_slice, with_rows
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session, is_initialized

WAY_OUT = 'pass by="elements" to hvd.shard, so that each rank takes whole batches'
ENDLESS = 2**62  # as the number of batches, which no training reaches
HINTS = Hints(
    call="call hvd.shard with the same arguments on every rank",
    amount="construct the same data on every rank, the whole of them, and do not split them before hvd.shard",
    order="",
    contents="construct the same data on every rank, and shuffle them with a random generator of their own that has"
             " the same seed on every rank",
)


def shard_sequence(
    data: Any, partition: Partition, shuffle: Any, seed: int, whole: bool, process_set: ProcessSet
) -> tuple[Any, Coverage]:
    """Return this rank's share of the batches; if `whole`, none of them is split."""
    if shuffle:
        raise UsageError(explain("The order of batches is shuffled by model.fit", "leave shuffle out here; fit(shuffle="
                                 "True), its default, shuffles each rank's batches", shuffle=shuffle))
    count = compat.count_batches(data)
    if partition.size == 1 and not keeps_accounts():
        return data, Coverage(None, None, 0, "the whole data")
    found: list[Batches] = []
    marks: list[Any] = []

    def describe() -> DataFacts:
        _require_batches(count)
        first, last = _first_and_last(data, count, seed)
        found[:] = [] if whole else [_batches_from(count_rows(first, WAY_OUT), count_rows(last, WAY_OUT), count or 1)]
        marks[:] = fingerprint(map_leaves(with_rows, [first, last]))
        what = f"{type(data).__name__}, training={partition.training}, seed={seed}, whole elements={whole}"
        return DataFacts(f"batches of {what}", _format_amount(count, found), "", marks)

    comparable = True
    if partition.size == 1:
        describe()
    else:
        comparable = require_same_data(
            "shard", describe, lambda: map_leaves(with_rows, list(_first_and_last(data, count, seed))), HINTS,
            process_set)
    patches.install(patches.ORDER, _keras_shuffles)
    for sentence in patches.newly_hidden():
        if prints_at(current_session().settings, "WARNING"):
            say(sentence)
    end = EpochEnd(data, seed, process_set)
    if whole:
        share, coverage = split_whole(data, partition, count, seed, end)
    else:
        share, coverage = split_sequence(data, partition, None if count is None else found[0], found[0].rows, seed, end)
    share.marks = marks
    return share, coverage if comparable else coverage.unverified()


def _batches_from(first: int, last: int, count: int) -> Batches:
    """Return the row counts of all batches, given those of the first and the last one."""
    if not 0 < last <= first:
        raise UsageError(explain("Batches must have the same number of rows, and the last one as many or fewer",
                                 "let __getitem__ return full batches, or pass by=\"elements\" to hvd.shard",
                                 batch_0=first, last_batch=last))
    return Batches(first, count - (last < first), last % first)


def _require_batches(count: int | None) -> None:
    if count == 0:
        raise UsageError(explain("Data to shard must have batches", "give __len__ the number of batches", batches=0))


def require_rows(loaded: Any, batch: int, rows: int) -> None:
    """Check that a batch is full.

    Raises:
        UsageError: It is not.
    """
    if count_rows(loaded, WAY_OUT) != rows:
        raise UsageError(explain("All batches but the last must have the same number of rows, so that every rank has"
                                 " some in every step", "let __getitem__ return full batches, or pass by=\"elements\""
                                 " to hvd.shard", batch=batch, rows=count_rows(loaded), rows_of_batch_0=rows))


def _first_and_last(data: Any, count: int | None, seed: int) -> tuple[Any, Any]:
    """Return the first and the last batch, read with the same global random numbers on every rank."""
    with common_randomness(seed):
        first = data[0]
    with common_randomness(seed):
        return first, first if count in (None, 1) else data[count - 1]


def _format_amount(count: int | None, batches: Sequence[Batches]) -> str:
    if not batches:
        return "batches without end" if count is None else f"{count:,} batches"
    rows, last = batches[0].rows, batches[0].last or batches[0].rows
    return f"batches of {rows} without end" if count is None else \
        f"{count:,} batches, of {rows} rows and the last of {last}"


def split_sequence(data: Any, partition: Partition, batches: Batches | None, rows: int, seed: int = 0,
                   end: EpochEnd | None = None) -> tuple[Any, Coverage]:
    """Return this rank's share of batches that all ranks can load.

    Args:
        partition: The partition, with the index of this rank.
        batches: The row counts of all batches; None for endless data.
        rows: The number of rows in a full batch.
        seed: The seed of the order of batches.
        end: Called at the end of each epoch.
    """
    uneven = rows if partition.training else None
    if batches is None:
        return _endless(data, partition, uneven, end)
    share = share_like(data)(data, *_split_rounds(batches, partition), uneven, end=end, order=(seed, partition.rank),
                             batches=batches, partition=partition)
    mine = len(share.whole_batches) * rows + sum(stop - start for _, start, stop in share.pieces)
    return share, Coverage(mine, batches.total, partition.dropped(batches.total))


def split_whole(data: Any, partition: Partition, count: int | None, seed: int = 0,
                end: EpochEnd | None = None) -> tuple[Any, Coverage]:
    """Return this rank's share of batches without splitting any; arguments as for `split_sequence`."""
    if count is None:
        share, coverage = _endless(data, partition, None, end)
        share.keeps_whole = True
        return share, coverage
    share = share_like(data)(data, _whole_batches(count, partition), [], None, end=end, order=(seed, partition.rank),
                             partition=partition)
    share.keeps_whole = True
    return share, Coverage(len(share.whole_batches), count, partition.dropped(count), what="element")


def _endless(data: Any, partition: Partition, rows: int | None, end: EpochEnd | None) -> tuple[Any, Coverage]:
    share = share_like(data)(data, range(partition.rank, ENDLESS, partition.size), [], rows, endless=True, end=end)
    return share, Coverage(None, None, 0, f"1 of every {partition.size} batches of endless data")


def _split_rounds(batches: Batches, partition: Partition) -> tuple[range, list[tuple[int, int, int]]]:
    """Return the whole batches of a rank and its parts of others; raise if it has none for training."""
    whole_batches, pieces = batches.rounds(partition)
    if not whole_batches and not pieces:
        partition.require_one_each(batches.total)
        pieces = [(0, 0, 0)]  # Keras cannot evaluate without a batch; an empty one changes no metric
    return whole_batches, pieces


def _whole_batches(count: int, partition: Partition) -> range:
    """Return the batches of a rank if none is split; raise if it has none."""
    partition.require_one_each(count, "element")
    if count < partition.size:
        raise UsageError(explain("Each rank needs at least one batch to evaluate, since batches are kept whole", "start"
                                 " fewer ranks, or evaluate on one: if hvd.rank() == 0: with hvd.alone(): ...",
                                 batches=count, ranks=partition.size))
    return partition.rows(count)


def _keras_shuffles(data: Any, shuffle: bool) -> bool:
    return data.take_over_shuffle(shuffle) if isinstance(data, Share) else shuffle


class Share:
    """Share of a `PyDataset` or `Sequence` for one rank; see `share_like`.

    Attributes:
        count: The total number of batches at the last assignment.
        whole_batches: The indices of the whole batches of this rank, in the order of its steps.
        pieces: The parts of batches in its last batch: (batch, first row, row after the last).
        batches: The row counts of all batches; None for endless data or whole batches.
        keeps_whole: Whether no batch is split, so that ranks have different numbers of rows in a step.
        marks: The fingerprint of the first and the last batch.
        assigned: Assigns the batches again after a membership change; None if membership is fixed.
    """

    def __init__(
        self, data: Any, whole_batches: range, pieces: Sequence[tuple[int, int, int]], rows: int | None = None,
        endless: bool = False, end: EpochEnd | None = None, order: tuple[int, int] = (0, 0),
        batches: Batches | None = None, partition: Partition | None = None,
    ) -> None:
        super().__init__(**compat.loading_options(data))
        self.data: Any = data
        self.count: int | None = None if endless else compat.count_batches(data)
        self.whole_batches: range = whole_batches
        self.pieces: Sequence[tuple[int, int, int]] = pieces
        self._rows, self._endless, self._end, self._order_seed = rows, endless, end, order
        self._partition = partition
        self.batches: Batches | None = batches
        self.keeps_whole: bool = False
        self.marks: Any = None
        self.assigned: Any = None
        self._order: Any = None
        self._epoch = 0
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        self.renew()
        return len(self.whole_batches) + bool(self.pieces)

    def renew(self, at_end: bool = False) -> None:
        """Assign the batches again if `on_epoch_end` or a callback has changed their number.

        Args:
            at_end: Whether the data's `on_epoch_end` has just run, which may also have changed the last batch.

        Raises:
            UsageError: There are too few batches now, or the last one does not fit.
        """
        if self._partition is None or self._endless or self.assigned is not None:
            return
        count = compat.count_batches(self.data)
        if count is None or (count == self.count and not (at_end and self.batches)):
            return
        _require_batches(count)
        if self.batches is None:
            self.whole_batches = _whole_batches(count, self._partition)
        else:
            with common_randomness(self._order_seed[0]):
                last = count_rows(self.data[count - 1], WAY_OUT)
            self.batches = _batches_from(self.batches.rows, last, count)
            self.whole_batches, self.pieces = _split_rounds(self.batches, self._partition)
        if self._order is not None and count != self.count:
            self._shuffle()
        self.count = count

    @property
    def num_batches(self) -> int | None:
        """Number of batches, for Keras 3; None if they are endless."""
        return None if self._endless else len(self)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.whole_batches):
            if index >= len(self):
                raise IndexError(index)
            parts = [self._part(*piece) for piece in self.pieces]
            return map_leaves(lambda *each: concatenate(each), *parts)
        batch = self.whole_batches[index if self._order is None else int(self._order[index])]
        loaded = self.data[batch]
        if self._rows is not None:
            require_rows(loaded, batch, self._rows)
        return loaded

    def _part(self, batch: int, start: int, stop: int) -> Any:
        loaded = self.data[batch]
        if self.batches is not None and batch < self.batches.full:
            require_rows(loaded, batch, self.batches.rows)
        elif self.batches is not None and count_rows(loaded, WAY_OUT) != self.batches.last:
            raise UsageError(explain("The last batch must have as many rows as when the batches were assigned to the"
                                     " ranks, at the end of the previous epoch", "change samples in on_epoch_end of the"
                                     " data",
                                     rows=count_rows(loaded), before=self.batches.last))
        return map_leaves(lambda leaf: take_slice(leaf, slice(start, stop)), loaded)

    def take_over_shuffle(self, shuffle: bool) -> bool:
        """Shuffle the whole batches here instead of in Keras, which would also move the smaller last batch.

        Otherwise, each rank would have the smaller batch in a different step, and the batches of a step would differ in
        size.

        Returns:
            False: Keras should not shuffle.
        """
        self._thread = threading.get_ident()
        self._order = None
        if shuffle and not self._endless:
            self._shuffle()
        return False

    def _shuffle(self) -> None:
        self._order = np.random.default_rng([*self._order_seed, self._epoch]).permutation(len(self.whole_batches))

    def on_epoch_begin(self) -> None:
        """Forward the call from Keras 3 to the data."""
        if hasattr(self.data, "on_epoch_begin"):
            self.data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Forward the call from Keras, with the same random numbers on every rank, and shuffle again.

        Calls from the loading threads of tf_keras are ignored, since they do not occur once per epoch on every rank.
        """
        if threading.get_ident() != self._thread:
            return
        self._epoch += 1
        if self._order is not None:
            self._shuffle()
        if self._end is not None:
            self._end(self._epoch)
        self.renew(at_end=compat.overrides(self.data, "on_epoch_end"))

    def __reduce__(self) -> Any:
        return _unpickle_share, (self.data, self.__dict__)


class EpochEnd:
    """End of an epoch: call the data's `on_epoch_end`, and check that all ranks have the same order afterwards."""

    def __init__(self, data: Any, seed: int, process_set: ProcessSet) -> None:
        self.data: Any = data
        self.seed: int = seed
        self.process_set: ProcessSet = process_set

    def __call__(self, epoch: int) -> None:
        """End an epoch; the first epoch is 1."""
        if not self.apply(epoch) or not is_initialized():
            return
        count = compat.count_batches(self.data)

        def describe() -> DataFacts:
            first, _ = _first_and_last(self.data, 1, self.seed)
            return DataFacts("on_epoch_end", f"{count} batches", "", fingerprint([first]))

        hints = Hints(HINTS.call, HINTS.amount, "", "shuffle in on_epoch_end with numpy.random or random, which"
                      " hvkeras seeds alike on every rank, or with a generator of the same seed on every rank")
        require_same_data("on_epoch_end of sharded data", describe,
                          lambda: _first_and_last(self.data, 1, self.seed)[:1], hints, self.process_set)

    def apply(self, epoch: int) -> bool:
        """Call the data's `on_epoch_end`, if any, with the same random numbers on every rank."""
        if not compat.overrides(self.data, "on_epoch_end"):
            return False
        with common_randomness(self.seed + epoch):
            self.data.on_epoch_end()
        return True


def share_like(data: Any) -> Callable[..., Any]:
    """Return the class for shares of `data`: a `Share` that is also an instance of the Keras class."""
    return _share_class(compat.batches_base(data))


@functools.cache
def _share_class(base: type) -> type:
    return type("Share", (Share, base), {"__module__": __name__})


def _unpickle_share(data: Any, state: dict[str, Any]) -> Any:
    share: Any = object.__new__(_share_class(compat.batches_base(data)))
    share.__dict__.update(state)
    return share
