"""State from which training resumes after a rank was lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.data.accounts import Positions, accounts
from hvkeras.elastic.commits import CommitFile
from hvkeras.errors import HostsUpdatedInterrupt, UsageError, explain
from hvkeras.job.preemption import PreemptionSignal


class State:
    """Base class of elastic states, which `hvd.elastic.run` saves, restores and synchronizes between ranks.

    Subclasses implement `save`, `restore` and `sync`. For commits that survive the process, they also implement
    `saved`, which returns the saved state, and `take`, which loads it.

    Example:
        class Position(hvd.elastic.State):
            def __init__(self):
                super().__init__(hvd.broadcast_object, hvd.rank)
                self.step = self.step_saved = 0

            def save(self):
                self.step_saved = self.step

            def restore(self):
                self.step = self.step_saved

            def sync(self):
                self.step = hvd.broadcast_object(self.step)
                self.save()

    Args:
        bcast_object: Function that broadcasts rank 0's object to every rank, such as `hvd.broadcast_object`.
        get_rank: Function that returns this process's rank, such as `hvd.rank`.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits: CommitFile | None = None
        self._hosts_have_changed: Callable[[], bool] | None = None
        self._must_leave: Callable[[], bool] = lambda: False
        self._preemption: PreemptionSignal | None = None
        self.commit_number: int = 0  # of the last commit, the same on all ranks
        self.newest_commit: tuple[object, Positions, int] | None = None  # one tuple, to be read by another thread
        self.steps_at_commit: int | None = None  # `steps_made()` at the last commit
        self.data_positions: Positions = {}  # at the last commit

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions to call after a change of ranks, before training resumes.

        Args:
            callbacks: Functions without parameters, such as one that scales the learning rate with the size. All
                ranks call them, new ones included, so they may call collectives.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and then the registered reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, from which training resumes if a rank is lost later.

        All ranks must call it after the same step. Rank 0 also writes its state to disk if the job can be restarted
        (HVKERAS_ELASTIC_DIR). After SIGTERM, a job with commits on disk ends here.

        With `hvkeras run --min-np` or `--host-discovery-script`, the state is written in the background. There, new
        workers join and workers on removed hosts leave at a commit.

        Raises:
            HostsUpdatedInterrupt: Workers join or leave now; `hvd.elastic.run` catches it.
        """
        ends = self._hosts_have_changed is None and self.must_commit()
        self.record_commit()
        waits = self._hosts_have_changed is None or (self._preemption is not None and self._preemption.is_pending)
        commits = self._commits
        is_written = commits is not None and (waits or not self.is_shared or commits.is_idle)
        full_state = self.gather_full_state(is_written)
        if commits is not None and is_written:
            write = commits.write if waits else commits.write_soon
            write(full_state, positions=self.data_positions)
        if ends and self._preemption is not None:
            self._bcast_object(None)  # wait until rank 0 has written
            self._preemption.end(f"the state was saved as commit {self.commit_number}")
        self.check_host_updates()

    def must_commit(self) -> bool:
        """Return whether all ranks should commit now because of a preemption; all call it after the same steps."""
        return self._preemption is not None and self._preemption.is_due()

    def record_commit(self) -> None:
        """Save the state, and the position in the data of `hvd.shard`."""
        self.save()
        self.steps_at_commit = self.steps_made()
        self.commit_number += 1
        self.data_positions = accounts().positions()
        self.newest_commit = self.saved(), self.data_positions, self.commit_number

    def check_host_updates(self) -> None:
        """Check whether workers are to join or leave; all ranks must call it after the same step.

        Raises:
            HostsUpdatedInterrupt: Workers join or leave now; `hvd.elastic.run` catches it.
        """
        if self._hosts_have_changed is not None and self._hosts_have_changed():
            self.prepare_change(self._must_leave())
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Save a copy of the state in memory.

        Raises:
            NotImplementedError: A subclass must implement it.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state that was saved last.

        Raises:
            NotImplementedError: A subclass must implement it.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the state of rank 0 to every rank.

        Raises:
            NotImplementedError: A subclass must implement it.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to new ranks; does nothing by default."""

    @property
    def must_restart(self) -> bool:
        """Return whether the program must restart when the ranks change, because its graphs cannot be retraced."""
        return False

    def steps_made(self) -> int | None:
        """Return the total number of completed steps; None if unknown."""
        return None

    def saved(self) -> object:
        """Return the last saved state, to be written to a file: anything that can be pickled."""
        return None

    def take(self, saved: Any) -> None:
        """Load a state that another process saved, without restoring it.

        Args:
            saved: Return value of `saved` in that process.
        """

    # For states that are sharded over ranks.

    @property
    def is_shared(self) -> bool:
        """Return whether the state is sharded over ranks."""
        return False

    def gather_full_state(self, is_wanted: bool) -> object:
        """Gather the full state that was saved last, to be written to a file; all ranks call it together.

        Args:
            is_wanted: Whether to gather it on this rank; True at most on rank 0.

        Returns:
            Argument for `take`; None unless `is_wanted`.
        """
        return self.saved() if is_wanted else None

    def prepare_change(self, leaves: bool) -> None:
        """Ensure that the remaining ranks hold the full state before others leave; all ranks call it together.

        Args:
            leaves: Whether this rank leaves.
        """

    def reshard(self) -> None:
        """Discard the shards that ranks hold for each other, before a full commit is restored."""

    def memory_of_shards(self) -> tuple[int, int]:
        """Return the bytes of the saved shards in memory: this rank's own, and those of other ranks."""
        return 0, 0

    def set_host_checks(self, hosts_have_changed: Callable[[], bool] | None,
                         leaves: Callable[[], bool] = lambda: False) -> None:
        """Set the functions that `check_host_updates` calls.

        Args:
            hosts_have_changed: Called on all ranks, where it returns the same value; None to check nothing.
            leaves: Returns whether this rank must leave after hosts have changed.
        """
        self._hosts_have_changed, self._must_leave = hosts_have_changed, leaves

    @property
    def _survives(self) -> bool:
        # Whether the remaining ranks continue from memory after others are lost.
        return self._hosts_have_changed is not None

    def set_preemption_signal(self, notice: PreemptionSignal | None) -> None:
        """Set the preemption signal that `must_commit` checks, or None."""
        self._preemption = notice

    def write_commits_to(self, commits: CommitFile | None) -> None:
        """Set the file that `commit` writes to, or None to write no file."""
        self._commits = commits


class ObjectState(State):
    """Elastic state of Python objects, which are its attributes.

    Example:
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, best=None)
        state.epoch += 1
        state.commit()

    Args:
        bcast_object: As for `State`.
        get_rank: As for `State`.
        **kwargs: The attributes and their initial values, which must be picklable.

    Raises:
        UsageError: An attribute cannot be copied, or has the name of a method.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        taken = [name for name in kwargs if hasattr(self, name)]
        if taken:
            raise UsageError(explain("A state's attributes must not have the names of its methods", "rename it",
                                     attribute=taken[0]))
        self._names = tuple(kwargs)
        self._saved_state: dict[str, Any] = kwargs
        self.__dict__.update(kwargs)
        ObjectState.save(self)

    if TYPE_CHECKING:  # the attributes given by name

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Copy the attributes."""
        self._saved_state = {name: _copied(name, getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Restore the attributes that were saved last."""
        self.__dict__.update(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Broadcast the attributes that rank 0 saved last to every rank."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    def saved(self) -> object:
        """Return the attributes that were saved last."""
        return self._saved_state

    def take(self, saved: Any) -> None:
        """Load a state that another process saved.

        Args:
            saved: Return value of `saved` in that process.

        Raises:
            UsageError: The saved state has different attributes.
        """
        if set(saved) != set(self._names):
            raise UsageError(explain("A commit must have the state's attributes", "remove HVKERAS_ELASTIC_DIR, or use a"
                                     " different one for each job", commit=sorted(saved), state=sorted(self._names)))
        self._saved_state = saved


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # copying may raise anything
        raise UsageError(explain(f"A state's attributes must be copyable ({type(error).__name__}: {error})",
                                 "give models and optimizers to TensorFlowKerasState", **{name: value})) from error
