"""Process sets: groups of ranks that communicate among themselves."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from hvkeras.errors import UsageError, explain
from hvkeras.host.mpi import is_communicator, ranks_within, running_mpi
from hvkeras.job.autograph import exclude_from_autograph
from hvkeras.job.session import Session, current_session, is_initialized


class ProcessSet:
    """Subset of the job's ranks; pass it as `process_set=` to collectives, optimizers and tapes.

    Every rank of the job, member or not, must register the set before it is used, with `add_process_set` or
    `init(process_sets=...)`.

    Example:
        >>> even = hvd.add_process_set(hvd.ProcessSet([0, 2]))
        >>> if even.included():
        ...     total = hvd.allreduce(value, op=hvd.Sum, process_set=even)

    Args:
        ranks_or_comm: Global ranks, in any order; or a communicator of mpi4py, which may differ between ranks, as
            returned by `MPI.COMM_WORLD.Split(color)`.

    Attributes:
        process_set_id: ID of the set: 0 for the global set; None until the set is registered.
        mpi_comm: Communicator that the set was created from; None for ranks.
    """

    process_set_id: int | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            self._ranks: tuple[int, ...] = tuple(sorted(ranks_within(ranks_or_comm)))
            return
        try:
            ranks = [operator.index(rank) for rank in ranks_or_comm]
        except (TypeError, ValueError):
            raise UsageError(explain("A process set must consist of global ranks", "pass a list of integers such as"
                                     " [0, 2]",
                                     ranks_or_comm=ranks_or_comm)) from None
        if not ranks or len(set(ranks)) != len(ranks):
            raise UsageError(explain("A process set must hold at least one rank, and each only once", ranks=ranks))
        self._ranks = tuple(sorted(ranks))

    @property
    def ranks(self) -> list[int]:
        """Global ranks, ascending."""
        return list(self._ranks)

    def included(self) -> bool:
        """Return whether this rank is a member."""
        return current_session().topology.rank in self.ranks

    def rank(self) -> int | None:
        """Return this rank's index within the set; None until the set is registered.

        Raises:
            UsageError: This rank is not a member.
        """
        if not self._is_registered():
            return None
        members, rank = self._ranks, current_session().topology.rank
        if rank not in members:
            raise UsageError(explain("Only members have a rank in a process set", "call included() first",
                                     rank=rank, members=list(members)))
        return members.index(rank)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None until the set is registered."""
        return len(self._ranks) if self._is_registered() else None

    def members(self) -> tuple[int, ...]:
        """Return the global ranks, ascending, of a registered set.

        Raises:
            UsageError: The set is not registered with the running job.
        """
        if not self._is_registered():
            raise UsageError(explain("A process set must be registered with the running job before it is used",
                                     "call hvd.add_process_set(process_set) on every rank, after hvd.init()",
                                     process_set=self))
        return self._ranks

    def _is_registered(self) -> bool:
        return is_initialized() and _registered().get(self.process_set_id) is self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __reduce__(self) -> Any:
        return _same_or_new, (self.process_set_id, self._ranks)


class _GlobalProcessSet(ProcessSet):
    """All ranks of the running job."""

    process_set_id = 0

    def __init__(self) -> None:
        """Skip the base class: the ranks are those of the running job."""

    @property
    def _ranks(self) -> tuple[int, ...]:  # type: ignore[override]  # other sets set it once
        return tuple(range(current_session().topology.size))

    @property
    def ranks(self) -> list[int]:
        """Global ranks, ascending; empty without a job, so that the set can be printed."""
        return list(self._ranks) if is_initialized() else []

    def _is_registered(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()


class _ProcessSets:
    """Process sets of a session, except the global one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sets: dict[int, ProcessSet] = {}
        self._exchanges = itertools.count(1)  # of sets created from communicators

    def by_id(self) -> dict[int, ProcessSet]:
        return dict(self._sets)

    def get(self, number: int | None) -> ProcessSet | None:
        return None if number is None else self._sets.get(number)

    def of_communicators(self, own: ProcessSet) -> list[list[int]]:
        """Return the ranks of the sets from all ranks' communicators, without duplicates."""
        session, mpi = self._session, running_mpi()
        world = session.launch.rendezvous.communicator or (mpi and mpi.COMM_WORLD)
        if world is None or world.Get_size() != session.topology.size:
            raise UsageError(explain("A process set from a communicator needs the MPI that started the job",
                                     "launch with mpirun, or pass a list of ranks", launcher=session.launch.launcher))
        own._ranks = tuple(sorted(ranks_within(own.mpi_comm, world)))
        if session.control is None:
            return [own.ranks]
        name = f"process sets {next(self._exchanges)} of job {session.number}"
        everyone = session.control.gather(name, own.ranks, session.settings.start_timeout)
        return [list(ranks) for ranks in sorted({tuple(ranks) for ranks in everyone})]

    def add(self, added: ProcessSet) -> None:
        size = self._session.topology.size
        if added is global_process_set or any(added.ranks == known.ranks for known in self._sets.values()):
            raise UsageError(explain("The same ranks can be registered only once", "use the existing set",
                                     process_set=added))
        if 1 < len(added.ranks) == size and added.ranks == global_process_set.ranks:
            raise UsageError(explain("The set of all ranks is registered already", "use hvd.global_process_set",
                                     process_set=added))
        unknown = [rank for rank in added.ranks if not 0 <= rank < size]
        if unknown:
            raise UsageError(explain("A process set must hold ranks of this job only",
                                     f"ranks run from 0 to {size - 1}", unknown=unknown, process_set=added))
        self._session.backend.add_process_set(added.ranks)
        added.process_set_id = max(self._sets, default=0) + 1
        self._sets[added.process_set_id] = added

    def remove(self, removed: ProcessSet) -> bool:
        number = removed.process_set_id
        if number is None or self._sets.get(number) is not removed:
            return False
        self._session.backend.remove_process_set(removed.ranks)
        del self._sets[number]
        removed.process_set_id = None
        return True

    def close(self) -> None:
        for stale in self._sets.values():
            stale.process_set_id = None
        self._sets.clear()


def _registered() -> _ProcessSets:
    return current_session().part(_ProcessSets)


def process_set_of(number: int) -> ProcessSet:
    """Return the process set with this ID; 0 is the global set.

    Raises:
        UsageError: No set with this ID is registered.
    """
    if number == 0:
        return global_process_set
    sets = registered_process_sets()
    if number not in sets:
        raise UsageError(explain("process_set_id must be 0 or the number of a registered process set",
                                 process_set_id=number, registered=sorted(filter(None, sets))))
    return sets[number]


def registered_process_sets() -> dict[int, ProcessSet]:
    """Return the process sets of the running job by ID, including the global set."""
    return {0: global_process_set, **(_registered().by_id() if is_initialized() else {})}


def _same_or_new(number: int | None, ranks: tuple[int, ...]) -> ProcessSet:
    known = _registered().get(number) if is_initialized() else None
    return known if known is not None and known._ranks == ranks else ProcessSet(ranks)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; every rank of the job must call this, in the same order.

    The parts of a split MPI communicator are registered in one call; each rank passes its part.

    Example:
        >>> first_half = hvd.add_process_set(range(hvd.size() // 2))
        >>> mine = hvd.add_process_set(hvd.ProcessSet(MPI.COMM_WORLD.Split(hvd.rank() % 2)))

    Args:
        process_set: The set, or its ranks.

    Returns:
        The registered set.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: A rank does not exist, or the same ranks are already registered. The global set always is.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    registered = _registered()
    if added.mpi_comm is None:
        registered.add(added)
        return added
    for ranks in registered.of_communicators(added):
        registered.add(added if ranks == added.ranks else ProcessSet(ranks))
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; every rank of the job must call this.

    Args:
        process_set: The set to unregister.

    Returns:
        False if the set was not registered, or is the global set.
    """
    return _registered().remove(process_set)


exclude_from_autograph(__name__)
