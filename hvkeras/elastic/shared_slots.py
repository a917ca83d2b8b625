"""Commits of optimizer state that is sharded over ranks (`shard_update=True`).

Each rank holds its own shard by reference, and a backup of another rank's shard, preferably of another host. When ranks
are lost, their shards come from the backups. When the number of ranks changes, the state is resharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.buckets import bucket_size
from hvkeras.collectives.reductions import allreduce
from hvkeras.collectives.scattering import alltoall
from hvkeras.compat import graphs
from hvkeras.elastic.snapshot import Snapshot, SnapshotReader
from hvkeras.errors import CommitError, explain
from hvkeras.gradients.distributed_part import DistributedPart
from hvkeras.job.session import current_session

Range = tuple[int, int, int]  # rank, and the [start, stop) of its elements in the flat variable


class LostShardsError(CommitError):
    """All copies of some shards of the last commit were lost.

    Args:
        ranks: Ranks that the shards belonged to.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = list(ranks)
        super().__init__(explain(
            "One of the two ranks that hold each shard of an optimizer with shard_update=True must survive",
            "start the job with commits on disk (HVKERAS_ELASTIC_DIR), which hold the full state",
            shards_of_ranks=self.ranks))


@dataclass(frozen=True)
class SlotAssignment:
    """Assignment of an optimizer's state to ranks; lists have an entry for each sharded variable.

    Attributes:
        indices: Indices in the optimizer's list of variables.
        dtypes: Names of the dtypes.
        bounds: Rank r holds the elements `[bounds[r], bounds[r + 1])` of the flat variable.
    """

    ranks: int
    indices: list[int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    bounds: list[tuple[int, ...]] = field(default_factory=list)

    def chunks(self, limit: int) -> Iterator[range]:
        """Divide the variables into consecutive chunks of one dtype, with about `limit` bytes per rank."""
        start, size = 0, 0
        for each, (dtype, bounds) in enumerate(zip(self.dtypes, self.bounds, strict=True)):
            own = bounds[-1] * int(tf.as_dtype(dtype).size) // self.ranks
            if each > start and (dtype != self.dtypes[start] or size + own > limit):
                yield range(start, each)
                start, size = each, 0
            size += own
        if start < len(self.indices):
            yield range(start, len(self.indices))

    def range_of(self, rank: int, each: int) -> Range:
        """Return the range of a variable's elements that a rank holds."""
        return rank, self.bounds[each][rank], self.bounds[each][rank + 1]

    def has_part(self, rank: int) -> bool:
        """Return whether a rank's shard has any elements."""
        return any(start < stop for _, start, stop in (self.range_of(rank, each) for each in range(len(self.indices))))

    def bytes_of(self, rank: int) -> int:
        """Return the size of a rank's shard in bytes."""
        ranges = [self.range_of(rank, each) for each in range(len(self.indices))]
        return sum((stop - start) * int(tf.as_dtype(dtype).size)
                   for (_, start, stop), dtype in zip(ranges, self.dtypes, strict=True))


@dataclass
class ShardCommit:
    """Shards of a commit that this rank holds.

    Attributes:
        number: Index of the commit, the same on all ranks; -1 before the first one.
        rank: This rank at the time of the commit.
        assignment: Assignment of the state at the time of the commit.
        own: Values of this rank's slots.
        backups: Backups of other ranks' shards, by rank: flat arrays, one for each variable of the assignment.
    """

    number: int
    rank: int
    assignment: SlotAssignment
    own: Snapshot
    backups: dict[int, list[Any]] = field(default_factory=dict)

    def ranks(self) -> list[int]:
        """Return the ranks whose shards it includes."""
        return sorted({self.rank, *self.backups}) if self.assignment.indices else []

    def part(self, rank: int) -> list[Any]:
        """Return the shard of a rank, as flat tensors or arrays."""
        if rank != self.rank:
            return self.backups[rank]
        return [tf.reshape(value, [-1]) for value in self.own.values()]


def choose_backups(hosts: Sequence[int], staying: Collection[int] = ()) -> dict[int, int]:
    """Choose for each rank another one that holds a backup of its shard, on another host if possible.

    Example:
        >>> choose_backups([0, 0, 1, 1])
        {0: 2, 1: 3, 2: 0, 3: 1}

    Args:
        hosts: Host index of each rank.
        staying: Ranks that may be chosen; all by default.
    """
    allowed = sorted(staying) or range(len(hosts))
    loads, found = dict.fromkeys(allowed, 0), {}
    for rank, host in enumerate(hosts):
        others = [other for other in allowed if other != rank]
        elsewhere = [other for other in others if hosts[other] != host] or others
        if elsewhere:
            chosen = min(elsewhere, key=lambda other: (loads[other], (other - rank) % len(hosts)))
            loads[chosen] += 1
            found[rank] = chosen
    return found


class SharedSlots:
    """Commits of an optimizer's sharded state, as far as this rank holds them.

    Args:
        optimizer: The optimizer, or a `LossScaleOptimizer` around it.
        part: The optimizer of these two that has sharded updates.
    """

    def __init__(self, optimizer: Any, part: DistributedPart) -> None:
        self.optimizer: Any = optimizer
        self._part = part
        self._reader = SnapshotReader([])
        self._number = -1  # of the last commit
        self._pending: ShardCommit | None = None  # not yet known to be complete on all ranks
        self.commit: ShardCommit = ShardCommit(-1, current_session().topology.rank, SlotAssignment(1), Snapshot([]))

    def plain(self) -> list[Any]:
        """Return the optimizer's variables that are not sharded."""
        return [one for one in compat.optimizer_variables(self.optimizer) if not _is_shared(one)]

    # Commits.

    def save(self, for_others: bool, staying: Collection[int] = ()) -> None:
        """Save the current state; all ranks call this together.

        The previous commit is released once all ranks hold the new one.

        Args:
            for_others: Whether ranks also hold backups for others.
            staying: Ranks that may hold backups; all by default.
        """
        topology = current_session().topology
        assignment, slots = self._assignment()
        new = ShardCommit(self._number + 1, topology.rank, assignment, self._snapshot(slots))
        if for_others and topology.size > 1 and assignment.indices:
            chosen = choose_backups(topology.host_numbers, staying)
            new.backups = self._exchange(new, chosen)
            self._pending = new
            # A rank that returns from this knows that all ranks hold the new commit; one that fails here holds both.
            allreduce(tf.zeros([1]), name="completion of a commit of shards")
        self.commit, self._pending, self._number = new, None, new.number

    def is_recoverable_from(self, staying: Collection[int]) -> bool:
        """Return whether the staying ranks hold all shards of the last commit, by the default choice of backups."""
        topology = current_session().topology
        chosen = choose_backups(topology.host_numbers)
        return all(rank in staying or chosen.get(rank) in staying for rank in range(topology.size))

    def memory(self) -> tuple[int, int]:
        """Return the bytes of this rank's shard, and of its backups of other ranks' shards."""
        commit = self.commit
        if not commit.assignment.indices:
            return 0, 0
        return commit.assignment.bytes_of(commit.rank), sum(commit.assignment.bytes_of(rank) for rank in commit.backups)

    def _snapshot(self, slots: Sequence[Any]) -> Snapshot:
        if not self._reader.reads(slots):
            self._reader = SnapshotReader(slots)
        return self._reader.snapshot() if slots else Snapshot([])

    def _assignment(self) -> tuple[SlotAssignment, list[Any]]:
        """Return the current assignment, and this rank's slots."""
        state = self._part.sharded_state
        if state is None:
            return SlotAssignment(1), []
        pieces = state.shared_slots(compat.optimizer_variables(self.optimizer))
        assignment = SlotAssignment(len(pieces[0].bounds) - 1 if pieces else 1, [piece.index for piece in pieces],
                    [tf.as_dtype(piece.slot.dtype).name for piece in pieces], [piece.bounds for piece in pieces])
        return assignment, [piece.slot for piece in pieces]

    def _exchange(self, new: ShardCommit, chosen: Mapping[int, int]) -> dict[int, list[Any]]:
        """Send this rank's shard to the rank that holds its backup; return the shards received."""
        assignment, me = new.assignment, new.rank
        backups = {rank: [_empty(dtype) for dtype in assignment.dtypes] for rank, backup in chosen.items()
                   if backup == me and assignment.has_part(rank)}
        pairs = {rank: {backup} for rank, backup in chosen.items()}
        received = _transfer(assignment, {me: new.part(me)}, pairs,
                             lambda sender, _, each: [assignment.range_of(sender, each)], "shards of a commit")
        for each, (rank, _, _), values in received:
            backups[rank][each] = values
        return backups

    # Restoring commits.

    def restore(self) -> None:
        """Assign this rank's shard of the last commit to its slots, if the assignment has not changed."""
        commit = self.commit
        state = self._part.sharded_state
        if state is None or not self._fits() or commit.number < 0:
            return
        with graphs.eagerly():
            _, slots = self._own_slots()
            for slot, value in zip(slots, commit.own.values(), strict=True):
                slot.assign(tf.reshape(tf.convert_to_tensor(value), slot.shape))
        state.forget()

    def _own_slots(self) -> tuple[list[int], list[Any]]:
        shared = [(index, one) for index, one in enumerate(compat.optimizer_variables(self.optimizer))
                  if _is_shared(one)]
        return [index for index, _ in shared], [one.slot for _, one in shared]

    def _fits(self) -> bool:
        """Return whether this rank's shard is the same as in the last commit."""
        topology, commit = current_session().topology, self.commit
        is_same = commit.number < 0 or (commit.rank == topology.rank and commit.assignment.ranks == topology.size)
        return is_same and self._is_for_current_ranks()

    def _is_for_current_ranks(self) -> bool:
        topology, sharding = current_session().topology, self._part.sharding
        return sharding is None or sharding.is_for(topology.size, topology.rank)

    def reshard(self, variables: Sequence[Any]) -> None:
        """Reshard the variables over the current ranks, and discard the last commit."""
        topology = current_session().topology
        if not self._is_for_current_ranks():
            self._part.reshard(variables)
        self.commit, self._number = ShardCommit(-1, topology.rank, SlotAssignment(1), Snapshot([])), -1

    def sync(self, variables: Sequence[Any]) -> bool:
        """Assign the last commit to the shards of the current ranks; all ranks call this together.

        Returns:
            False if there was nothing to transfer: shards are in place, or rank 0 has assigned full values to them.

        Raises:
            LostShardsError: No rank holds a copy of some shard.
        """
        topology, own = current_session().topology, self.commit
        gathered = allgather_object((own.number, own.assignment), name="assignment of shards")
        number, assignment = max(gathered, key=lambda one: one[0])
        self._number = number
        mine = next((commit for commit in (own, self._pending) if commit is not None and commit.number == number), None)
        held = mine.ranks() if mine is not None else []
        gathered_shards = allgather_object((held, mine is own and self._fits()), name="shards held by each rank")
        if all(fits for _, fits in gathered_shards):
            return False
        if not self._is_for_current_ranks():
            self._part.reshard(variables)
        if not assignment.indices:  # rank 0 had the full state, and has assigned it to the shards
            return False
        servers = _servers(assignment, [ranks for ranks, _ in gathered_shards])
        parts = {} if mine is None else {rank: mine.part(rank) for rank in mine.ranks()
                                         if servers.get(rank) == topology.rank}
        self._deliver(assignment, parts, servers)
        return True

    def _deliver(self, assignment: SlotAssignment, parts: dict[int, list[Any]], servers: Mapping[int, int]) -> None:
        """Send each rank the elements of its current shard."""
        topology = current_session().topology
        now, slots = self._assignment()
        of_index = {index: each for each, index in enumerate(now.indices)}
        optimizer_variables = compat.optimizer_variables(self.optimizer)

        def wanted(rank: int, each: int) -> tuple[int, int]:
            assigned = of_index.get(assignment.indices[each])
            return (0, assignment.bounds[each][-1]) if assigned is None else now.range_of(rank, assigned)[1:]

        def ranges(sender: int, receiver: int, each: int) -> list[Range]:
            start, stop = wanted(receiver, each)
            found = [(rank, max(start, first), min(stop, last)) for rank, first, last in
                     (assignment.range_of(rank, each) for rank, server in servers.items() if server == sender)]
            return [one for one in found if one[1] < one[2]]

        buffers: dict[int, Any] = {}
        for each, dtype in enumerate(assignment.dtypes):
            start, stop = wanted(topology.rank, each)
            if start < stop:
                buffers[each] = np.empty(stop - start, tf.as_dtype(dtype).as_numpy_dtype)
        pairs = {server: range(topology.size) for server in servers.values()}
        for each, (_, first, last), values in _transfer(assignment, parts, pairs, ranges, "resharding"):
            start, _ = wanted(topology.rank, each)
            buffers[each][first - start : last - start] = values
        with graphs.eagerly():
            for each, values in buffers.items():
                assigned = of_index.get(assignment.indices[each])
                target = (compat.as_tf_variable(optimizer_variables[assignment.indices[each]]) if assigned is None
                          else slots[assigned])
                target.assign(values.reshape(tuple(target.shape)))
        if (state := self._part.sharded_state) is not None:
            state.forget()

    # Handover to another process.

    def saved(self) -> dict[str, Any]:
        """Return the last commit, as plain objects and arrays."""
        commit = self.commit
        return {"number": commit.number, "rank": commit.rank, "assignment": asdict(commit.assignment),
                "own": commit.own, "guarded": commit.backups}

    def take(self, saved: Mapping[str, Any]) -> None:
        """Load the return value of `saved` in another process."""
        own = saved["own"] if isinstance(saved["own"], Snapshot) else Snapshot(saved["own"])
        self.commit = ShardCommit(saved["number"], saved["rank"], SlotAssignment(**saved["assignment"]), own,
                              dict(saved["guarded"]))

    def gather(self, plain: Sequence[Any]) -> list[Any] | None:
        """Gather the current state on rank 0; all ranks call this together.

        Args:
            plain: Values of the variables that are not sharded.

        Returns:
            Values of all of the optimizer's variables on rank 0, else None.
        """
        state = self._part.sharded_state
        if state is None:
            return list(plain)
        was_gathered = state.is_gathered((0,))  # for another user, such as the end of `fit`
        state.gather((0,))
        remaining = iter(plain)
        values = None
        if current_session().topology.rank == 0:
            values = [one.numpy() if _is_shared(one) else next(remaining)
                      for one in compat.optimizer_variables(self.optimizer)]
        if not was_gathered:
            state.forget()
        return values


def _is_shared(variable: Any) -> bool:
    return bool(getattr(variable, "is_whole_of_shards", False))


def _empty(dtype: str) -> Any:
    return np.empty(0, tf.as_dtype(dtype).as_numpy_dtype)


def _servers(assignment: SlotAssignment, offered: Sequence[Collection[int]]) -> dict[int, int]:
    """Choose the rank that sends each shard, balancing the number of shards per sender.

    Args:
        assignment: Assignment of the commit.
        offered: For each rank, the ranks whose shards it holds.

    Raises:
        LostShardsError: No rank holds a copy of some shard.
    """
    loads = [0] * len(offered)
    servers: dict[int, int] = {}
    lost = []
    for rank in range(assignment.ranks):
        if not assignment.has_part(rank):
            continue
        holders = [other for other, ranks in enumerate(offered) if rank in ranks]
        if not holders:
            lost.append(rank)
            continue
        servers[rank] = min(holders, key=lambda other: (loads[other], other))
        loads[servers[rank]] += 1
    if lost:
        raise LostShardsError(lost)
    return servers


def _transfer(assignment: SlotAssignment, parts: Mapping[int, Sequence[Any]], pairs: Mapping[int, Collection[int]],
           ranges: Callable[[int, int, int], Sequence[Range]], name: str) -> Iterator[tuple[int, Range, Any]]:
    """Send ranges of shards between ranks, a bucket at a time.

    Args:
        assignment: Assignment of the shards.
        parts: Shards that this rank holds, by the rank that they were assigned to.
        pairs: Receivers by sender.
        ranges: Returns the ranges for (sender, receiver, index of a variable in the assignment).
        name: Prefix of the names of the collectives.

    Yields:
        Received data: the index of the variable, the range, and an array of its elements.
    """
    session = current_session()
    me, size = session.topology.rank, session.topology.size
    for number, chunk in enumerate(assignment.chunks(bucket_size(session.settings))):
        sent, splits = [], [0] * size
        for receiver in sorted(pairs.get(me, ())):
            for each in chunk:
                for rank, start, stop in ranges(me, receiver, each):
                    first = assignment.bounds[each][rank]
                    sent.append(parts[rank][each][start - first : stop - first])
                    splits[receiver] += stop - start
        with graphs.eagerly(), tf.device("CPU:0"):
            packed = tf.concat(sent, 0) if sent else tf.zeros([0], assignment.dtypes[chunk.start])
            received, _ = alltoall(packed, splits=tf.constant(splits, tf.int64), name=f"{name} {number}")
        values, at = received.numpy(), 0
        for sender in range(size):
            for each in chunk if me in pairs.get(sender, ()) else ():
                for one in ranges(sender, me, each):
                    length = one[2] - one[1]
                    yield each, one, values[at : at + length]
                    at += length
