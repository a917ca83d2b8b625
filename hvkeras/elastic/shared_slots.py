"""The part of a commit that no rank has alone: an optimizer's state whose update the ranks share (`shard_update=True`).

Each rank keeps its own part, by reference, and a copy of that of another rank, on another host where there is one. When
ranks are lost, the parts come from whoever has them; when their number changes, all is assigned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.reductions import allreduce
from hvkeras.collectives.scattering import alltoall
from hvkeras.compat import graphs
from hvkeras.elastic.snapshot import Snapshot, SnapshotReader
from hvkeras.errors import CommitError, explain
from hvkeras.gradients.distributed_part import DistributedPart
from hvkeras.job.session import current_session

Range = tuple[int, int, int]  # the rank whose part it is, the first of its elements in the whole, and the one after it


class LostPartsError(CommitError):
    """Ranks were lost that alone had parts of the last commit.

    Args:
        ranks: The ranks that the parts belonged to.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = list(ranks)
        super().__init__(explain(
            "Each part of an optimizer with shard_update=True is kept by two ranks, and both of one were lost",
            "start the job with commits on disk (HVKERAS_ELASTIC_DIR), which hold the whole state",
            parts_of_ranks=self.ranks))


@dataclass(frozen=True)
class SlotAssignment:
    """How the ranks share an optimizer's state; lists have an entry for each variable that they share.

    Attributes:
        ranks: The number of ranks.
        indices: The indices in the optimizer's list of variables.
        dtypes: The names of the dtypes.
        bounds: Rank r has the elements `[bounds[r], bounds[r + 1])`.
    """

    ranks: int
    indices: list[int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    bounds: list[tuple[int, ...]] = field(default_factory=list)

    def chunks(self, limit: int) -> Iterator[range]:
        """Divides the variables into consecutive ones of one dtype, of which a rank has about `limit` bytes."""
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
        """The elements of a variable that a rank has."""
        return rank, self.bounds[each][rank], self.bounds[each][rank + 1]

    def has_part(self, rank: int) -> bool:
        """Whether a rank has anything."""
        return any(start < stop for _, start, stop in (self.range_of(rank, each) for each in range(len(self.indices))))

    def bytes_of(self, rank: int) -> int:
        """The bytes that a rank has."""
        ranges = [self.range_of(rank, each) for each in range(len(self.indices))]
        return sum((stop - start) * int(tf.as_dtype(dtype).size)
                   for (_, start, stop), dtype in zip(ranges, self.dtypes, strict=True))


@dataclass
class KeptSlots:
    """What this rank keeps of a commit.

    Attributes:
        number: Counts what was kept; the same on all ranks for the same commit; -1 before the first time.
        rank: This rank's number then.
        assignment: How the state was shared.
        own: The values of this rank's slots.
        guarded: The parts of other ranks, by rank: flat arrays, one for each variable of the assignment.
    """

    number: int
    rank: int
    assignment: SlotAssignment
    own: Snapshot
    guarded: dict[int, list[Any]] = field(default_factory=dict)

    def ranks(self) -> list[int]:
        """The ranks whose parts it has."""
        return sorted({self.rank, *self.guarded}) if self.assignment.indices else []

    def part(self, rank: int) -> list[Any]:
        """The part of a rank: flat tensors or arrays."""
        if rank != self.rank:
            return self.guarded[rank]
        return [tf.reshape(value, [-1]) for value in self.own.values()]


def guards(hosts: Sequence[int], staying: Collection[int] = ()) -> dict[int, int]:
    """Chooses for each rank another one that keeps a copy of its part: on another host if there is one.

    Example:
        >>> guards([0, 0, 1, 1])
        {0: 2, 1: 3, 2: 0, 3: 1}

    Args:
        hosts: The number of each rank's host.
        staying: The ranks that may be chosen; all by default.
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
    """What this rank keeps of the shared state of an optimizer.

    Args:
        optimizer: The optimizer, or a `LossScaleOptimizer` around it.
        part: The one of these whose update ranks share.
    """

    def __init__(self, optimizer: Any, part: DistributedPart) -> None:
        self.optimizer: Any = optimizer
        self._part = part
        self._reader = SnapshotReader([])
        self._number = -1  # of what the ranks have kept last
        self._pending: KeptSlots | None = None  # what this rank does not know yet that all have
        self.kept: KeptSlots = KeptSlots(-1, current_session().topology.rank, SlotAssignment(1), Snapshot([]))

    def plain(self) -> list[Any]:
        """The variables of the optimizer that each rank has for itself."""
        return [one for one in compat.optimizer_variables(self.optimizer) if not _is_shared(one)]

    # Commits.

    def save(self, for_others: bool, staying: Collection[int] = ()) -> None:
        """Keeps the state as it is now; all ranks call this together.

        What was kept before is let go once all ranks have the new one.

        Args:
            for_others: Whether ranks also keep the parts of others.
            staying: The ranks that may keep the parts of others; all by default.
        """
        topology = current_session().topology
        assignment, slots = self._assignment()
        new = KeptSlots(self._number + 1, topology.rank, assignment, self._snapshot(slots))
        if for_others and topology.size > 1 and assignment.indices:
            chosen = guards(topology.host_numbers, staying)
            new.guarded = self._exchanged(new, chosen)
            self._pending = new
            # Who returns from here knows that all have it; who does not keeps both.
            allreduce(tf.zeros([1]), name="the parts of a commit are kept")
        self.kept, self._pending, self._number = new, None, new.number

    def is_safe_with(self, staying: Collection[int]) -> bool:
        """Whether those who stay have all parts of what was kept last, as far as all ranks know it."""
        topology = current_session().topology
        chosen = guards(topology.host_numbers)
        return all(rank in staying or chosen.get(rank) in staying for rank in range(topology.size))

    def memory(self) -> tuple[int, int]:
        """The bytes of this rank's part, and of those of other ranks that it keeps."""
        kept = self.kept
        if not kept.assignment.indices:
            return 0, 0
        return kept.assignment.bytes_of(kept.rank), sum(kept.assignment.bytes_of(rank) for rank in kept.guarded)

    def _snapshot(self, slots: Sequence[Any]) -> Snapshot:
        if not self._reader.reads(slots):
            self._reader = SnapshotReader(slots)
        return self._reader.snapshot() if slots else Snapshot([])

    def _assignment(self) -> tuple[SlotAssignment, list[Any]]:
        """How the state is shared now, and this rank's slots."""
        state = self._part.sharded_state
        if state is None:
            return SlotAssignment(1), []
        pieces = state.shared_slots(compat.optimizer_variables(self.optimizer))
        assignment = SlotAssignment(len(pieces[0].bounds) - 1 if pieces else 1, [piece.index for piece in pieces],
                    [tf.as_dtype(piece.slot.dtype).name for piece in pieces], [piece.bounds for piece in pieces])
        return assignment, [piece.slot for piece in pieces]

    def _exchanged(self, new: KeptSlots, chosen: Mapping[int, int]) -> dict[int, list[Any]]:
        """Sends this rank's part to the one that guards it; returns those that this rank guards."""
        assignment, me = new.assignment, new.rank
        found = {rank: [_empty(dtype) for dtype in assignment.dtypes] for rank, guard in chosen.items()
                 if guard == me and assignment.has_part(rank)}
        pairs = {rank: {guard} for rank, guard in chosen.items()}
        moved = _moved(assignment, {me: new.part(me)}, pairs, lambda sender, _,
                       each: [assignment.range_of(sender, each)],
                       "parts of a commit")
        for each, (rank, _, _), values in moved:
            found[rank][each] = values
        return found

    # What comes after a commit.

    def restore(self) -> None:
        """Assigns this rank's own part of what was kept last, if it has the same part now."""
        kept = self.kept
        state = self._part.sharded_state
        if state is None or not self._fits() or kept.number < 0:
            return
        with graphs.eagerly():
            _, slots = self._own_slots()
            for slot, value in zip(slots, kept.own.values(), strict=True):
                slot.assign(tf.reshape(tf.convert_to_tensor(value), slot.shape))
        state.forget()

    def _own_slots(self) -> tuple[list[int], list[Any]]:
        shared = [(index, one) for index, one in enumerate(compat.optimizer_variables(self.optimizer))
                  if _is_shared(one)]
        return [index for index, _ in shared], [one.slot for _, one in shared]

    def _fits(self) -> bool:
        """Whether this rank has the part now that it had when it kept the state."""
        topology, kept = current_session().topology, self.kept
        is_same = kept.number < 0 or (kept.rank == topology.rank and kept.assignment.ranks == topology.size)
        return is_same and self._is_for_present_ranks()

    def _is_for_present_ranks(self) -> bool:
        """Whether the variables are shared among the ranks that there are now."""
        topology, sharding = current_session().topology, self._part.sharding
        return sharding is None or sharding.is_for(topology.size, topology.rank)

    def reshard(self, variables: Sequence[Any]) -> None:
        """Deals the variables to the ranks that there are now, and forgets what was kept.

        Args:
            variables: The model's trainable variables.
        """
        topology = current_session().topology
        if not self._is_for_present_ranks():
            self._part.reshard(variables)
        self.kept, self._number = KeptSlots(-1, topology.rank, SlotAssignment(1), Snapshot([])), -1

    def sync(self, variables: Sequence[Any]) -> bool:
        """Gives each rank its part of what was kept last, among the ranks that there are now; all call this together.

        Args:
            variables: The model's trainable variables.

        Returns:
            Whether it did. If not, parts are where they belong already, or rank 0 has assigned whole values to them.

        Raises:
            LostPartsError: Nobody has some part.
        """
        topology, own = current_session().topology, self.kept
        said = allgather_object((own.number, own.assignment), name="how the state was shared")
        number, assignment = max(said, key=lambda one: one[0])
        self._number = number
        mine = next((kept for kept in (own, self._pending) if kept is not None and kept.number == number), None)
        has = mine.ranks() if mine is not None else []
        told = allgather_object((has, mine is own and self._fits()), name="who has which part")
        if all(fits for _, fits in told):
            return False
        if not self._is_for_present_ranks():
            self._part.reshard(variables)
        if not assignment.indices:  # rank 0 had all of it, and has now assigned it to the parts
            return False
        servers = _servers(assignment, [ranks for ranks, _ in told])
        parts = {} if mine is None else {rank: mine.part(rank) for rank in mine.ranks()
                                         if servers.get(rank) == topology.rank}
        self._deliver(assignment, parts, servers)
        return True

    def _deliver(self, assignment: SlotAssignment, parts: dict[int, list[Any]], servers: Mapping[int, int]) -> None:
        """Sends each rank what belongs to its part now."""
        topology = current_session().topology
        now, slots = self._assignment()
        of_index = {index: each for each, index in enumerate(now.indices)}
        everything = compat.optimizer_variables(self.optimizer)

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
        for each, (_, first, last), values in _moved(assignment, parts, pairs, ranges, "parts assigned again"):
            start, _ = wanted(topology.rank, each)
            buffers[each][first - start : last - start] = values
        with graphs.eagerly():
            for each, values in buffers.items():
                assigned = of_index.get(assignment.indices[each])
                target = (compat.as_tf_variable(everything[assignment.indices[each]]) if assigned is None
                          else slots[assigned])
                target.assign(values.reshape(tuple(target.shape)))
        if (state := self._part.sharded_state) is not None:
            state.forget()

    # What another process takes over.

    def saved(self) -> dict[str, Any]:
        """Returns what was kept last, as plain objects and arrays."""
        kept = self.kept
        return {"number": kept.number, "rank": kept.rank, "assignment": asdict(kept.assignment), "own": kept.own,
                "guarded": kept.guarded}

    def take(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `saved` returned in another process."""
        own = saved["own"] if isinstance(saved["own"], Snapshot) else Snapshot(saved["own"])
        self.kept = KeptSlots(saved["number"], saved["rank"], SlotAssignment(**saved["assignment"]), own,
                              dict(saved["guarded"]))

    def whole(self, plain: Sequence[Any]) -> list[Any] | None:
        """Gathers the state on rank 0, as it is now; all ranks call this together.

        Args:
            plain: The values of the variables that each rank has for itself.

        Returns:
            The values of all of the optimizer's variables; None on other ranks than 0.
        """
        state = self._part.sharded_state
        if state is None:
            return list(plain)
        is_wanted_later = state.is_gathered((0,))  # by who has asked for it, as `fit` does at its end
        state.gather((0,))
        left = iter(plain)
        values = None
        if current_session().topology.rank == 0:
            values = [one.numpy() if _is_shared(one) else next(left)
                      for one in compat.optimizer_variables(self.optimizer)]
        if not is_wanted_later:
            state.forget()
        return values


def _is_shared(variable: Any) -> bool:
    return bool(getattr(variable, "is_whole_of_shards", False))


def _empty(dtype: str) -> Any:
    return np.empty(0, tf.as_dtype(dtype).as_numpy_dtype)


def _servers(assignment: SlotAssignment, offered: Sequence[Collection[int]]) -> dict[int, int]:
    """Chooses who sends which part, so that all send about as much.

    Args:
        assignment: How the state was shared.
        offered: Whose parts each rank has.

    Raises:
        LostPartsError: Nobody has some part.
    """
    loads = [0] * len(offered)
    servers: dict[int, int] = {}
    lost = []
    for rank in range(assignment.ranks):
        if not assignment.has_part(rank):
            continue
        having = [other for other, ranks in enumerate(offered) if rank in ranks]
        if not having:
            lost.append(rank)
            continue
        servers[rank] = min(having, key=lambda other: (loads[other], other))
        loads[servers[rank]] += 1
    if lost:
        raise LostPartsError(lost)
    return servers


def _moved(assignment: SlotAssignment, parts: Mapping[int, Sequence[Any]], pairs: Mapping[int, Collection[int]],
           ranges: Callable[[int, int, int], Sequence[Range]], name: str) -> Iterator[tuple[int, Range, Any]]:
    """Sends ranges of parts between ranks, a few megabytes at a time.

    Args:
        assignment: How the parts were assigned.
        parts: The parts that this rank has, by the rank that they were assigned to.
        pairs: To whom each rank sends.
        ranges: What a rank sends to another one of a variable of the assignment.
        name: Names the collectives.

    Yields:
        What this rank has received: of which variable, which range, and an array.
    """
    session = current_session()
    me, size = session.topology.rank, session.topology.size
    for number, chunk in enumerate(assignment.chunks(session.settings.bucket_size)):
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
